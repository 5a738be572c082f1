/* The load generator's hot path, compiled: what costs every chunk.

   `turn` does what the Python way in loop.py does, with the same results, for streams over plain sockets;
   `usual` finds the reads that answer.py need not look into. The Python ways stay: they are used where this
   file was not compiled, for TLS, and to check this one against. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>

#define MOST_EVENTS 256
#define READ_BYTES 4096 /* as in loop.py */
#define STAMP_BYTES 48  /* struct scm_timestamping with timespecs of 64 bits; as in wire.py */
#define STAMPING 37     /* SCM_TIMESTAMPING, asm-generic/socket.h; as in wire.py */

/* What the log keeps of one read, besides its bytes; loop.py's TIMES. */
struct times {
    int64_t stamp_s, stamp_ns, read_ns;
};

static const char USUAL_END[4] = {'\n', '\n', '\r', '\n'};

/* One buffer for all: the GIL is held from the reading to the copying. */
static char buffer[READ_BYTES];

/* Reads once. The number of bytes, 0 at the end, -1 with errno; the kernel's stamp, or zeros for none. */
static ssize_t
receive(int fd, struct times *times)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(STAMP_BYTES)];
    } control;
    struct iovec part = {buffer, sizeof buffer};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control};
    ssize_t count;
    do {
        message.msg_controllen = sizeof control;
        count = recvmsg(fd, &message, 0);
    } while (count < 0 && errno == EINTR);
    if (count < 0)
        return count;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    memset(times, 0, sizeof *times);
    times->read_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    struct cmsghdr *told = CMSG_FIRSTHDR(&message);
    if (told != NULL && told->cmsg_level == SOL_SOCKET && told->cmsg_type == STAMPING &&
        told->cmsg_len == CMSG_LEN(STAMP_BYTES))
        memcpy(times, CMSG_DATA(told), 2 * sizeof(int64_t));
    return count;
}

/* Appends (first, second) to a list and gives the second away. 0, or -1 with an exception. */
static int
append_pair(PyObject *list, PyObject *first, PyObject *second)
{
    PyObject *pair = second == NULL ? NULL : PyTuple_Pack(2, first, second);
    Py_XDECREF(second);
    int failed = pair == NULL || PyList_Append(list, pair) < 0;
    Py_XDECREF(pair);
    return failed ? -1 : 0;
}

/* Puts a read into a stream's log. Its bytes (new), or NULL with an exception. */
static PyObject *
keep(PyObject *stream, ssize_t count, const struct times *times)
{
    PyObject *reads = PyTuple_GET_ITEM(stream, 0), *log = PyTuple_GET_ITEM(stream, 1);
    PyObject *data = PyBytes_FromStringAndSize(buffer, count);
    if (data == NULL)
        return NULL;
    Py_ssize_t size = PyByteArray_GET_SIZE(log);
    if (PyByteArray_Resize(log, size + (Py_ssize_t)sizeof *times) < 0 || PyList_Append(reads, data) < 0) {
        Py_DECREF(data);
        return NULL;
    }
    memcpy(PyByteArray_AS_STRING(log) + size, times, sizeof *times);
    return data;
}

/* Reads a stream that is readable, when, and notes what its owner must hear of. 0, or -1 with an exception. */
static int
read_stream(int fd, PyObject *stream, PyObject *noticed, int64_t *read_ns)
{
    struct times times;
    if (!PyTuple_Check(stream) || PyTuple_GET_SIZE(stream) != 3 || !PyList_Check(PyTuple_GET_ITEM(stream, 0)) ||
        !PyByteArray_Check(PyTuple_GET_ITEM(stream, 1))) {
        PyErr_SetString(PyExc_TypeError, "a stream is (reads, times, owner)");
        return -1;
    }
    PyObject *owner = PyTuple_GET_ITEM(stream, 2);
    ssize_t count = receive(fd, &times);
    if (count < 0) {
        if (errno == EAGAIN || errno == EWOULDBLOCK)
            return 0;
        int number = errno;
        return append_pair(noticed, owner, PyObject_CallFunction(PyExc_OSError, "is", number, strerror(number)));
    }
    *read_ns = times.read_ns;
    if (count == 0)
        return append_pair(noticed, owner, PyBytes_FromStringAndSize(NULL, 0));
    PyObject *data = keep(stream, count, &times);
    if (data == NULL)
        return -1;
    if (count >= 4 && memcmp(buffer + count - 4, USUAL_END, 4) == 0) {
        Py_DECREF(data);
        return 0;
    }
    return append_pair(noticed, owner, data);
}

PyDoc_STRVAR(turn_doc,
"turn(epoll_fd, timeout_ms, most, until_ns, streams, noticed, others) -> int\n\n"
"Waits for at most `most` events and returns how many were served; 0 after a signal, too. The first read past\n"
"`until_ns` (CLOCK_MONOTONIC) is the last: what waits behind it comes up again. A descriptor in `streams`\n"
"(fd -> (reads, times, owner)) that is readable, and nothing else, is read once into its log; what its owner\n"
"must notice goes as (owner, bytes or OSError) to `noticed`. All other events go as (fd, events) to `others`.");

static PyObject *
turn(PyObject *module, PyObject *const *arguments, Py_ssize_t given)
{
    struct epoll_event events[MOST_EVENTS];
    if (given != 7 || !PyDict_Check(arguments[4]) || !PyList_Check(arguments[5]) || !PyList_Check(arguments[6])) {
        PyErr_SetString(PyExc_TypeError, "turn(epoll_fd, timeout_ms, most, until_ns, streams, noticed, others)");
        return NULL;
    }
    long epoll_fd = PyLong_AsLong(arguments[0]), timeout_ms = PyLong_AsLong(arguments[1]);
    long most = PyLong_AsLong(arguments[2]);
    int64_t until_ns = PyLong_AsLongLong(arguments[3]), read_ns = 0;
    PyObject *streams = arguments[4], *noticed = arguments[5], *others = arguments[6];
    if (PyErr_Occurred())
        return NULL;
    int count;
    Py_BEGIN_ALLOW_THREADS
    count = epoll_wait((int)epoll_fd, events, (int)(most < MOST_EVENTS ? most : MOST_EVENTS), (int)timeout_ms);
    Py_END_ALLOW_THREADS
    if (count < 0) {
        if (errno != EINTR)
            return PyErr_SetFromErrno(PyExc_OSError);
        if (PyErr_CheckSignals() < 0)
            return NULL;
        count = 0;
    }
    for (int index = 0; index < count; index++) {
        if (index && read_ns >= until_ns) /* a level-triggered epoll tells of the others again */
            return PyLong_FromLong(index);
        PyObject *fd = PyLong_FromLong(events[index].data.fd), *stream = NULL;
        if (fd == NULL)
            return NULL;
        if (events[index].events == EPOLLIN)
            stream = PyDict_GetItemWithError(streams, fd);
        int failed;
        if (stream != NULL) {
            Py_INCREF(stream); /* a garbage collection in between may run anything */
            failed = read_stream(events[index].data.fd, stream, noticed, &read_ns);
            Py_DECREF(stream);
        }
        else
            failed = PyErr_Occurred() || append_pair(others, fd, PyLong_FromUnsignedLong(events[index].events));
        Py_DECREF(fd);
        if (failed)
            return NULL;
    }
    return PyLong_FromLong(count);
}

static int
is_plain(const unsigned char *text, const unsigned char *end)
{
    for (; text < end; text++)
        if (*text < 0x20 || *text > 0x7e || *text == '"' || *text == '\\')
            return 0;
    return 1;
}

/* The length of the chunk that begins at `data`, framing included; 0 if its size line is not a plain one. */
static Py_ssize_t
chunk_length(const char *data, const char *end)
{
    Py_ssize_t size = 0;
    const char *at = data;
    for (; at < end && at < data + 7; at++) {
        if (*at >= '0' && *at <= '9')
            size = size * 16 + (*at - '0');
        else if (*at >= 'a' && *at <= 'f')
            size = size * 16 + (*at - 'a' + 10);
        else
            break;
    }
    if (at == data || end - at < 2 || at[0] != '\r' || at[1] != '\n')
        return 0;
    size += at - data + 4;
    return size <= end - data ? size : 0;
}

/* Whether a chunk of `size` bytes is begin, plain text and end. 1 or 0, or -1 with an exception. */
static int
is_usual(const char *data, Py_ssize_t size, PyObject *before, PyObject *after)
{
    PyObject *key = PyLong_FromSsize_t(size), *begin;
    if (key == NULL)
        return -1;
    begin = PyDict_GetItemWithError(before, key);
    Py_DECREF(key);
    if (begin == NULL)
        return PyErr_Occurred() ? -1 : 0;
    if (!PyBytes_Check(begin))
        return 0;
    Py_ssize_t begin_size = PyBytes_GET_SIZE(begin), end_size = PyBytes_GET_SIZE(after);
    const char *end = data + size - end_size;
    return begin_size + end_size <= size && memcmp(data, PyBytes_AS_STRING(begin), begin_size) == 0 &&
           memcmp(end, PyBytes_AS_STRING(after), end_size) == 0 &&
           is_plain((const unsigned char *)data + begin_size, (const unsigned char *)end);
}

PyDoc_STRVAR(usual_doc,
"usual(reads, start, before, after, counts) -> int\n\n"
"How many reads, from `start` on, are chunks whose texts alone are new, each `before[len(chunk)]`, then\n"
"characters that JSON does not escape, then `after`; how many there are in each read goes to `counts`.");

static PyObject *
usual(PyObject *module, PyObject *const *arguments, Py_ssize_t given)
{
    if (given != 5 || !PyList_Check(arguments[0]) || !PyDict_Check(arguments[2]) || !PyBytes_Check(arguments[3]) ||
        !PyList_Check(arguments[4])) {
        PyErr_SetString(PyExc_TypeError, "usual(reads, start, before, after, counts)");
        return NULL;
    }
    PyObject *reads = arguments[0];
    Py_ssize_t start = PyLong_AsSsize_t(arguments[1]), index;
    if (start < 0)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "start is %zd", start);
    for (index = start; index < PyList_GET_SIZE(reads); index++) {
        PyObject *read = PyList_GET_ITEM(reads, index);
        if (!PyBytes_Check(read))
            break;
        const char *data = PyBytes_AS_STRING(read), *end = data + PyBytes_GET_SIZE(read);
        long count = 0;
        while (data < end) {
            Py_ssize_t size = chunk_length(data, end);
            int usual = size ? is_usual(data, size, arguments[2], arguments[3]) : 0;
            if (usual < 0)
                return NULL;
            if (!usual)
                break;
            data += size;
            count++;
        }
        if (data < end || count == 0)
            break;
        PyObject *number = PyLong_FromLong(count);
        int failed = number == NULL || PyList_Append(arguments[4], number) < 0;
        Py_XDECREF(number);
        if (failed)
            return NULL;
    }
    return PyLong_FromSsize_t(index - start);
}

static PyMethodDef methods[] = {
    {"turn", (PyCFunction)(void (*)(void))turn, METH_FASTCALL, turn_doc},
    {"usual", (PyCFunction)(void (*)(void))usual, METH_FASTCALL, usual_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvbench.loadgen._reads",
    .m_doc = "The load generator's hot path, compiled.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC
PyInit__reads(void)
{
    return PyModule_Create(&definition);
}
