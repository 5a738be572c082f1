/* What the two files of kvbench.processes.loadgen.sockets._reads share. */

#ifndef KVBENCH_READS_H
#define KVBENCH_READS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

/* When a read's last bytes came by the kernel's stamp (real time, 0 for none), when it was done, and since when
   bytes of it may have lain there: at `since_ns` there was nothing to read (both monotonic). */
struct times {
    int64_t stamp_ns, read_ns, since_ns;
};

typedef struct log Log;

extern PyType_Spec log_spec;
extern PyMethodDef log_functions[];

/* Before anything else of _log.c is used. */
void prepare_log(void);

/* Whether a read ends as one does that brought whole events in whole chunks. */
int ends_as_usual(const char *data, Py_ssize_t size);

/* Adds a read: its bytes, or how many chunks it brought if they are as expected. 0, or -1 with an exception.
   The bytes (new) go to `kept`, or NULL if they are not. */
int keep_read(Log *log, const char *data, Py_ssize_t size, const struct times *times, PyObject **kept);

#endif
