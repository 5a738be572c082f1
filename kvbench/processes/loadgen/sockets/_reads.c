/* The load generator's hot path, compiled: what costs every chunk.

   `Streams.turn` does what the Python way in loop.py does, with the same results, for streams over plain
   sockets; what was read goes to a log (_log.c). The Python ways stay: they are used where this was not
   compiled, for TLS, and to check this against. */

#include "_reads.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>

#define MOST_EVENTS 256
#define READ_BYTES 4096    /* as in loop.py */
#define STAMP_BYTES 48     /* struct scm_timestamping with timespecs of 64 bits; as in wire.py */
#define STAMPING 37        /* SCM_TIMESTAMPING, asm-generic/socket.h; as in wire.py */

#define SLICE_NS 1000000   /* as in loop.py */

/* A stream that is read. `empty_ns`: a time at which nothing of it lay unread. */
struct stream {
    Log *log;
    PyObject *owner;
    int64_t empty_ns;
};

typedef struct {
    PyObject_HEAD
    int size;               /* of the table */
    struct stream *streams; /* by descriptor; a log of NULL: none */
    int left;               /* whether a read of this turn filled the buffer, so that more may lie there */
    int64_t scanned_ns;     /* a look that reported every descriptor that was readable, and all were served */
    int64_t served_ns;      /* the same, of the last turn: its caller has yet to serve the others */
} Streams;

static PyTypeObject *log_type;

/* One buffer for all: the GIL is held from the reading to the copying. */
static char buffer[READ_BYTES];

static int64_t
monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Reads once. The number of bytes, 0 at the end, -1 with errno; the kernel's stamp, or zero for none. */
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
    times->stamp_ns = 0;
    times->read_ns = monotonic_ns();
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header != NULL && header->cmsg_level == SOL_SOCKET && header->cmsg_type == STAMPING &&
        header->cmsg_len == CMSG_LEN(STAMP_BYTES)) {
        int64_t timespec[2];
        memcpy(timespec, CMSG_DATA(header), sizeof timespec);
        times->stamp_ns = timespec[0] * 1000000000 + timespec[1];
    }
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

/* Puts a read into the log, and tells of one that may be the last. 0, or -1 with an exception. */
static int
keep(const struct stream *stream, Py_ssize_t count, const struct times *times, PyObject *noticed)
{
    PyObject *kept;
    if (keep_read(stream->log, buffer, count, times, &kept) < 0)
        return -1;
    if (kept == NULL || ends_as_usual(buffer, count)) {
        Py_XDECREF(kept);
        return 0;
    }
    return append_pair(noticed, stream->owner, kept);
}

/* Reads a stream that is readable, and notes what its owner must hear of. `now_ns` is a moment ago, and then when it
   was read. 0, or -1 with an exception. */
static int
read_stream(Streams *self, int fd, const struct stream *stream, PyObject *noticed, int64_t *now_ns)
{
    struct times times = {.since_ns = stream->empty_ns};
    int64_t before_ns = *now_ns;
    ssize_t count = receive(fd, &times);
    if (count < 0) {
        if (errno == EAGAIN || errno == EWOULDBLOCK)
            return 0;
        int number = errno;
        return append_pair(noticed, stream->owner,
                           PyObject_CallFunction(PyExc_OSError, "is", number, strerror(number)));
    }
    *now_ns = times.read_ns;
    if (times.since_ns < self->scanned_ns)
        times.since_ns = self->scanned_ns;
    int full = count == sizeof buffer; /* then the rest may be as old */
    self->streams[fd].empty_ns = full ? times.since_ns : before_ns;
    self->left |= full;
    if (count == 0)
        return append_pair(noticed, stream->owner, PyBytes_FromStringAndSize(NULL, 0));
    return keep(stream, count, &times, noticed);
}

static struct stream *
stream_of(Streams *self, int fd)
{
    return fd >= 0 && fd < self->size && self->streams[fd].log != NULL ? &self->streams[fd] : NULL;
}

/* Serves one event. 0, or -1 with an exception. */
static int
serve(Streams *self, const struct epoll_event *event, PyObject *noticed, PyObject *others, int64_t *now_ns)
{
    int fd = event->data.fd;
    const struct stream *found = event->events == EPOLLIN ? stream_of(self, fd) : NULL;
    if (found == NULL) {
        PyObject *number = PyLong_FromLong(fd);
        int failed = number == NULL || append_pair(others, number, PyLong_FromUnsignedLong(event->events)) < 0;
        Py_XDECREF(number);
        return failed ? -1 : 0;
    }
    struct stream stream = *found; /* a garbage collection in between may run anything */
    Py_INCREF(stream.log);
    Py_INCREF(stream.owner);
    int failed = read_stream(self, fd, &stream, noticed, now_ns);
    Py_DECREF(stream.owner);
    Py_DECREF(stream.log);
    return failed;
}

/* Waits as epoll_wait does, in slices, so that each wait that ends in vain shows that nothing had come until it
   began. When the last one began goes to `looked_ns`. */
static int
look(Streams *self, int epoll_fd, struct epoll_event *events, int most, int timeout_ms, int64_t *looked_ns)
{
    int64_t until_ns = 0;
    for (;;) {
        *looked_ns = monotonic_ns();
        if (until_ns == 0)
            until_ns = timeout_ms < 0 ? INT64_MAX : *looked_ns + (int64_t)timeout_ms * 1000000;
        int64_t left_ns = until_ns - *looked_ns;
        int64_t wait_ns = left_ns < 0 ? 0 : left_ns < SLICE_NS ? left_ns : SLICE_NS;
        int count = epoll_wait(epoll_fd, events, most, (int)((wait_ns + 999999) / 1000000));
        if (count != 0 || left_ns <= SLICE_NS)
            return count;
        self->scanned_ns = self->served_ns = *looked_ns;
    }
}

PyDoc_STRVAR(turn_doc,
"turn(epoll_fd, timeout_ms, most, until_ns, noticed, others) -> int\n\n"
"Waits for at most `most` events and returns how many were served; 0 after a signal, too. The first read past\n"
"`until_ns` (CLOCK_MONOTONIC) is the last: what waits behind it comes up again. A stream that is readable, and\n"
"nothing else, is read once into its log; what its owner must notice goes as (owner, bytes or OSError) to\n"
"`noticed`. All other events go as (fd, events) to `others`.");

static PyObject *
streams_turn(Streams *self, PyObject *arguments)
{
    struct epoll_event events[MOST_EVENTS];
    int epoll_fd, timeout_ms, most, count;
    long long until_ns;
    int64_t looked_ns, now_ns;
    PyObject *noticed, *others;
    if (!PyArg_ParseTuple(arguments, "iiiLO!O!", &epoll_fd, &timeout_ms, &most, &until_ns, &PyList_Type, &noticed,
                          &PyList_Type, &others))
        return NULL;
    most = most < MOST_EVENTS ? most : MOST_EVENTS;
    self->scanned_ns = self->served_ns;
    self->left = 0;
    Py_BEGIN_ALLOW_THREADS
    count = look(self, epoll_fd, events, most, timeout_ms, &looked_ns);
    Py_END_ALLOW_THREADS
    if (count < 0) {
        if (errno != EINTR)
            return PyErr_SetFromErrno(PyExc_OSError);
        if (PyErr_CheckSignals() < 0)
            return NULL;
        return PyLong_FromLong(0);
    }
    now_ns = looked_ns;
    for (int index = 0; index < count; index++) {
        if (index && now_ns >= until_ns) /* a level-triggered epoll tells of the others again */
            return PyLong_FromLong(index);
        if (serve(self, &events[index], noticed, others, &now_ns) < 0)
            return NULL;
    }
    if (count < most && !self->left) /* whatever is not among them had nothing to read then */
        self->served_ns = looked_ns;
    return PyLong_FromLong(count);
}

/* Makes the table large enough for a descriptor. 0, or -1 with an exception. */
static int
make_room(Streams *self, int fd)
{
    int size = self->size > 0 ? self->size : 64;
    while (size <= fd)
        size *= 2;
    if (size == self->size)
        return 0;
    struct stream *streams = PyMem_Realloc(self->streams, size * sizeof *streams);
    if (streams == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    memset(streams + self->size, 0, (size - self->size) * sizeof *streams);
    self->streams = streams;
    self->size = size;
    return 0;
}

static void
take_out(Streams *self, int fd)
{
    struct stream *found = stream_of(self, fd);
    if (found == NULL)
        return;
    struct stream stream = *found;
    *found = (struct stream){NULL, NULL, 0};
    Py_DECREF(stream.owner);
    Py_DECREF(stream.log);
}

PyDoc_STRVAR(streams_add_doc,
"add(fd, log, owner) -> None\n\n"
"From now on `turn` reads the descriptor into the log.");

static PyObject *
streams_add(Streams *self, PyObject *arguments)
{
    int fd;
    PyObject *log, *owner;
    if (!PyArg_ParseTuple(arguments, "iO!O", &fd, log_type, &log, &owner))
        return NULL;
    if (fd < 0 || fd > 1 << 24)
        return PyErr_Format(PyExc_ValueError, "descriptor %d", fd);
    if (make_room(self, fd) < 0)
        return NULL;
    take_out(self, fd);
    self->streams[fd] = (struct stream){(Log *)Py_NewRef(log), Py_NewRef(owner), monotonic_ns()};
    Py_RETURN_NONE;
}

static PyObject *
streams_remove(Streams *self, PyObject *descriptor)
{
    long fd = PyLong_AsLong(descriptor);
    if (fd == -1 && PyErr_Occurred())
        return NULL;
    if (fd >= 0 && fd < self->size)
        take_out(self, (int)fd);
    Py_RETURN_NONE;
}

static PyObject *
streams_empty_ns(Streams *self, PyObject *descriptor)
{
    long fd = PyLong_AsLong(descriptor);
    if (fd == -1 && PyErr_Occurred())
        return NULL;
    struct stream *found = fd >= 0 && fd < self->size ? stream_of(self, (int)fd) : NULL;
    int64_t empty_ns = found != NULL && found->empty_ns > self->scanned_ns ? found->empty_ns : self->scanned_ns;
    return PyLong_FromLongLong(empty_ns);
}

static int
streams_traverse(Streams *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    for (int fd = 0; fd < self->size; fd++)
        Py_VISIT(self->streams[fd].owner);
    return 0;
}

static int
streams_clear(Streams *self)
{
    for (int fd = 0; fd < self->size; fd++)
        take_out(self, fd);
    return 0;
}

static void
streams_dealloc(Streams *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    streams_clear(self);
    PyMem_Free(self->streams);
    type->tp_free(self);
    Py_DECREF(type);
}

/* times */

PyDoc_STRVAR(gaps_doc,
"gaps(stamps) -> bytes\n\n"
"The seconds (float each) from each of the stamps (int64 each, ns) to the next.");

static PyObject *
gaps(PyObject *module, PyObject *argument)
{
    Py_buffer stamps;
    if (PyObject_GetBuffer(argument, &stamps, PyBUF_SIMPLE) < 0)
        return NULL;
    Py_ssize_t count = stamps.len / (Py_ssize_t)sizeof(int64_t) - 1;
    PyObject *found = PyBytes_FromStringAndSize(NULL, count > 0 ? count * sizeof(float) : 0);
    for (Py_ssize_t index = 0; found != NULL && index < count; index++) {
        int64_t pair[2];
        memcpy(pair, (char *)stamps.buf + index * sizeof *pair, sizeof pair);
        float gap_s = (float)((double)(pair[1] - pair[0]) / 1e9);
        memcpy(PyBytes_AS_STRING(found) + index * sizeof gap_s, &gap_s, sizeof gap_s);
    }
    PyBuffer_Release(&stamps);
    return found;
}

PyDoc_STRVAR(set_timer_doc,
"set_timer(fd, at_ns) -> None\n\n"
"The timerfd fires once, at that time of its clock, at once if it has passed; zero disarms it.");

static PyObject *
set_timer(PyObject *module, PyObject *arguments)
{
    int fd;
    long long at_ns;
    if (!PyArg_ParseTuple(arguments, "iL", &fd, &at_ns))
        return NULL;
    struct itimerspec wanted = {.it_value = {at_ns / 1000000000, at_ns % 1000000000}};
    if (timerfd_settime(fd, TFD_TIMER_ABSTIME, &wanted, NULL) < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

/* the module */

static PyMethodDef streams_methods[] = {
    {"add", (PyCFunction)streams_add, METH_VARARGS, streams_add_doc},
    {"remove", (PyCFunction)streams_remove, METH_O, "remove(fd) -> None: before the descriptor is closed."},
    {"empty_ns", (PyCFunction)streams_empty_ns, METH_O,
     "empty_ns(fd) -> int: a time (CLOCK_MONOTONIC) at which nothing of the stream lay unread."},
    {"turn", (PyCFunction)streams_turn, METH_VARARGS, turn_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot streams_slots[] = {
    {Py_tp_doc, "The streams that are read here, by descriptor, each with its log and its owner."},
    {Py_tp_methods, streams_methods},
    {Py_tp_traverse, streams_traverse},
    {Py_tp_clear, streams_clear},
    {Py_tp_dealloc, streams_dealloc},
    {0, NULL},
};

static PyType_Spec streams_spec = {
    .name = "kvbench.processes.loadgen.sockets._reads.Streams",
    .basicsize = sizeof(Streams),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = streams_slots,
};

static PyMethodDef methods[] = {
    {"gaps", gaps, METH_O, gaps_doc},
    {"set_timer", set_timer, METH_VARARGS, set_timer_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvbench.processes.loadgen.sockets._reads",
    .m_doc = "The load generator's hot path, compiled.",
    .m_size = -1,
    .m_methods = methods,
};

/* Makes a type and puts it into the module under a name. The type (the module's), or NULL with an exception. */
static PyObject *
add_type(PyObject *module, PyType_Spec *spec, const char *name)
{
    PyObject *type = PyType_FromSpec(spec);
    if (type != NULL && PyModule_AddObject(module, name, type) < 0)
        Py_CLEAR(type);
    return type;
}

PyMODINIT_FUNC
PyInit__reads(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    prepare_log();
    log_type = (PyTypeObject *)add_type(module, &log_spec, "Log");
    if (log_type == NULL || add_type(module, &streams_spec, "Streams") == NULL ||
        PyModule_AddFunctions(module, log_functions) < 0)
        Py_CLEAR(module);
    return module;
}
