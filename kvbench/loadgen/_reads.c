/* The load generator's hot path, compiled: what costs every chunk.

   `Streams.turn` does what the Python way in loop.py does, with the same results, for streams over plain
   sockets; `Log` keeps what was read as the one in loop.py does, and forgets the bytes of chunks that are known
   but for their text; `usual` finds such chunks later. The Python ways stay: they are used where this file was
   not compiled, for TLS, and to check this one against. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

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
#define SLACK_NS 100000    /* as in clock.py */
#define LONGEST_NS INT32_MAX /* as in clock.py */
#define KEPT_BYTES 24      /* of a read, besides its bytes: struct times and its place in the list */

/* When a read's bytes came by the kernel's stamp (real time, 0 for none), and when it was done (monotonic). */
struct times {
    int64_t stamp_ns, read_ns;
};

typedef struct {
    PyObject_HEAD
    PyObject *reads; /* bytes of a read, or how many chunks as expected it brought */
    struct times *times;
    Py_ssize_t count, room; /* of times: as many as reads, and as fit */
    Py_ssize_t bytes;       /* of the reads that are kept */
    PyObject *begin, *after; /* what is expected around a chunk's text; NULL: nothing */
} Log;

/* A stream that is read. */
struct stream {
    Log *log;
    PyObject *owner;
};

typedef struct {
    PyObject_HEAD
    int size;               /* of the table */
    struct stream *streams; /* by descriptor; a log of NULL: none */
} Streams;

static const char USUAL_END[4] = {'\n', '\n', '\r', '\n'};

static PyTypeObject *log_type;

/* One buffer for all: the GIL is held from the reading to the copying. */
static char buffer[READ_BYTES];

/* chunks that are known but for their text */

static int
is_plain(const unsigned char *text, const unsigned char *end)
{
    for (; text < end; text++)
        if (*text < 0x20 || *text > 0x7e || *text == '"' || *text == '\\')
            return 0;
    return 1;
}

/* The bytes of the size line that begins at `data`; 0 if it is none of the plain ones, or its chunk is not whole.
   The chunk's bytes behind the line, with the CRLF at its end, go to `size`. */
static Py_ssize_t
size_line(const char *data, const char *end, Py_ssize_t *size)
{
    const char *at = data;
    for (*size = 0; at < end && at < data + 7; at++) {
        if (*at >= '0' && *at <= '9')
            *size = *size * 16 + (*at - '0');
        else if (*at >= 'a' && *at <= 'f')
            *size = *size * 16 + (*at - 'a' + 10);
        else
            break;
    }
    if (at == data || end - at < 2 || at[0] != '\r' || at[1] != '\n')
        return 0;
    *size += 2;
    at += 2;
    return *size <= end - at ? at - data : 0;
}

/* How many chunks a read brings if each is a size line, `begin`, plain text and `after`; else 0. */
static long
usual_chunks(const char *data, Py_ssize_t bytes, PyObject *begin, PyObject *after)
{
    const char *end = data + bytes;
    Py_ssize_t begin_size = PyBytes_GET_SIZE(begin), after_size = PyBytes_GET_SIZE(after), size, line;
    long count = 0;
    for (; data < end; data += size, count++) {
        line = size_line(data, end, &size);
        data += line;
        if (line == 0 || begin_size + after_size > size || memcmp(data, PyBytes_AS_STRING(begin), begin_size) != 0 ||
            memcmp(data + size - after_size, PyBytes_AS_STRING(after), after_size) != 0 ||
            !is_plain((const unsigned char *)data + begin_size, (const unsigned char *)data + size - after_size))
            return 0;
    }
    return count;
}

/* the log of a stream */

static void
expect_nothing(Log *self)
{
    Py_CLEAR(self->begin);
    Py_CLEAR(self->after);
}

/* Adds a read's times. 0, or -1 with an exception. */
static int
note_times(Log *self, const struct times *times)
{
    if (self->count == self->room) {
        Py_ssize_t room = self->room > 0 ? 2 * self->room : 32;
        struct times *more = PyMem_Realloc(self->times, room * sizeof *more);
        if (more == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        self->times = more;
        self->room = room;
    }
    self->times[self->count++] = *times;
    return 0;
}

/* Adds what a read brought, which is given away: bytes, or a number of chunks. 0, or -1 with an exception. */
static int
note(Log *self, PyObject *what, const struct times *times)
{
    if (what == NULL)
        return -1;
    int failed = PyList_Append(self->reads, what) < 0;
    Py_DECREF(what);
    if (failed)
        return -1;
    if (note_times(self, times) < 0) {
        PyList_SetSlice(self->reads, self->count, PY_SSIZE_T_MAX, NULL);
        return -1;
    }
    return 0;
}

PyDoc_STRVAR(log_add_doc,
"add(data, stamp, read_ns) -> None\n\n"
"A read, with the kernel's ``struct scm_timestamping`` (or zeros). Nothing is expected any more.");

static PyObject *
log_add(Log *self, PyObject *arguments)
{
    PyObject *data;
    const char *stamp;
    Py_ssize_t stamp_bytes;
    long long read_ns;
    int64_t timespec[2];
    if (!PyArg_ParseTuple(arguments, "Sy#L", &data, &stamp, &stamp_bytes, &read_ns))
        return NULL;
    if (stamp_bytes < (Py_ssize_t)sizeof timespec)
        return PyErr_Format(PyExc_ValueError, "a stamp of %zd bytes", stamp_bytes);
    memcpy(timespec, stamp, sizeof timespec);
    struct times times = {timespec[0] * 1000000000 + timespec[1], read_ns};
    expect_nothing(self);
    if (note(self, Py_NewRef(data), &times) < 0)
        return NULL;
    self->bytes += PyBytes_GET_SIZE(data);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(log_expect_doc,
"expect(begin, after) -> None\n\n"
"The next byte begins a chunk. A read in which each chunk is ``begin``, characters that JSON does not escape and\n"
"``after`` is from now on kept as their number alone, until a read comes that is not.");

static PyObject *
log_expect(Log *self, PyObject *arguments)
{
    PyObject *begin, *after;
    if (!PyArg_ParseTuple(arguments, "SS", &begin, &after))
        return NULL;
    Py_ssize_t size = PyBytes_GET_SIZE(after);
    if (size < 4 || memcmp(PyBytes_AS_STRING(after) + size - 4, USUAL_END, 4) != 0) {
        PyErr_SetString(PyExc_ValueError, "a chunk of an event ends with two line feeds and CRLF");
        return NULL;
    }
    Py_XSETREF(self->begin, Py_NewRef(begin));
    Py_XSETREF(self->after, Py_NewRef(after));
    Py_RETURN_NONE;
}

/* Takes the first reads off the list. A new list, or NULL with an exception. */
static PyObject *
take_reads(Log *self, Py_ssize_t count)
{
    PyObject *rest = PyList_GetSlice(self->reads, count, PY_SSIZE_T_MAX), *taken = self->reads;
    if (rest == NULL)
        return NULL;
    if (PyList_SetSlice(taken, count, PY_SSIZE_T_MAX, NULL) < 0) {
        Py_DECREF(rest);
        return NULL;
    }
    self->reads = rest;
    for (Py_ssize_t index = 0; index < count; index++)
        if (PyBytes_Check(PyList_GET_ITEM(taken, index)))
            self->bytes -= PyBytes_GET_SIZE(PyList_GET_ITEM(taken, index));
    return taken;
}

/* clock.py's arrivals: when bytes came (int64 each), how long they lay (int32 each). How many stamps are useless. */
static long
arrivals(const struct times *times, Py_ssize_t count, int64_t sent_ns, int64_t offset_ns, char *came, char *lags)
{
    long useless = 0;
    for (Py_ssize_t index = 0; index < count; index++) {
        int64_t read_ns = times[index].read_ns, came_ns = times[index].stamp_ns - offset_ns;
        if (came_ns - read_ns > SLACK_NS || came_ns < sent_ns - SLACK_NS) {
            came_ns = read_ns;
            useless++;
        }
        if (came_ns > read_ns)
            came_ns = read_ns;
        int32_t lag_ns = read_ns - came_ns < LONGEST_NS ? (int32_t)(read_ns - came_ns) : LONGEST_NS;
        memcpy(came + index * sizeof came_ns, &came_ns, sizeof came_ns);
        memcpy(lags + index * sizeof lag_ns, &lag_ns, sizeof lag_ns);
    }
    return useless;
}

PyDoc_STRVAR(log_take_doc,
"take(most, sent_ns, offset_ns) -> (reads, came, lags, useless)\n\n"
"Takes the first reads out, at most so many: bytes, or a number of expected chunks; then as clock.arrivals.");

static PyObject *
log_take(Log *self, PyObject *arguments)
{
    Py_ssize_t count;
    long long sent_ns, offset_ns;
    if (!PyArg_ParseTuple(arguments, "nLL", &count, &sent_ns, &offset_ns))
        return NULL;
    count = count < 0 ? 0 : count < self->count ? count : self->count;
    PyObject *came = PyBytes_FromStringAndSize(NULL, count * sizeof(int64_t));
    PyObject *lags = PyBytes_FromStringAndSize(NULL, count * sizeof(int32_t));
    PyObject *reads = came != NULL && lags != NULL ? take_reads(self, count) : NULL;
    if (reads == NULL) {
        Py_XDECREF(came);
        Py_XDECREF(lags);
        return NULL;
    }
    long useless =
        arrivals(self->times, count, sent_ns, offset_ns, PyBytes_AS_STRING(came), PyBytes_AS_STRING(lags));
    self->count -= count;
    if (self->count > 0)
        memmove(self->times, self->times + count, self->count * sizeof *self->times);
    return Py_BuildValue("NNNl", reads, came, lags, useless);
}

static PyObject *
log_reads(Log *self, void *unused)
{
    return PyList_GetSlice(self->reads, 0, PY_SSIZE_T_MAX);
}

static PyObject *
log_held(Log *self, void *unused)
{
    return PyLong_FromSsize_t(self->bytes + self->count * KEPT_BYTES);
}

static Py_ssize_t
log_length(Log *self)
{
    return self->count;
}

static PyObject *
log_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    Log *self = (Log *)type->tp_alloc(type, 0);
    if (self != NULL && (self->reads = PyList_New(0)) == NULL)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void
log_dealloc(Log *self)
{
    PyTypeObject *type = Py_TYPE(self);
    expect_nothing(self);
    Py_XDECREF(self->reads);
    PyMem_Free(self->times);
    type->tp_free(self);
    Py_DECREF(type);
}

/* reading */

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
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    times->stamp_ns = 0;
    times->read_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    struct cmsghdr *told = CMSG_FIRSTHDR(&message);
    if (told != NULL && told->cmsg_level == SOL_SOCKET && told->cmsg_type == STAMPING &&
        told->cmsg_len == CMSG_LEN(STAMP_BYTES)) {
        int64_t timespec[2];
        memcpy(timespec, CMSG_DATA(told), sizeof timespec);
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
    Log *log = stream->log;
    if (log->begin != NULL) {
        long chunks = usual_chunks(buffer, count, log->begin, log->after);
        if (chunks > 0)
            return note(log, PyLong_FromLong(chunks), times);
        expect_nothing(log);
    }
    PyObject *data = PyBytes_FromStringAndSize(buffer, count);
    if (data == NULL || note(log, Py_NewRef(data), times) < 0) {
        Py_XDECREF(data);
        return -1;
    }
    log->bytes += count;
    if (count >= 4 && memcmp(buffer + count - 4, USUAL_END, 4) == 0) {
        Py_DECREF(data);
        return 0;
    }
    return append_pair(noticed, stream->owner, data);
}

/* Reads a stream that is readable, when, and notes what its owner must hear of. 0, or -1 with an exception. */
static int
read_stream(int fd, const struct stream *stream, PyObject *noticed, int64_t *read_ns)
{
    struct times times;
    ssize_t count = receive(fd, &times);
    if (count < 0) {
        if (errno == EAGAIN || errno == EWOULDBLOCK)
            return 0;
        int number = errno;
        return append_pair(noticed, stream->owner,
                           PyObject_CallFunction(PyExc_OSError, "is", number, strerror(number)));
    }
    *read_ns = times.read_ns;
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
serve(Streams *self, const struct epoll_event *event, PyObject *noticed, PyObject *others, int64_t *read_ns)
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
    int failed = read_stream(fd, &stream, noticed, read_ns);
    Py_DECREF(stream.owner);
    Py_DECREF(stream.log);
    return failed;
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
    int64_t read_ns = 0;
    PyObject *noticed, *others;
    if (!PyArg_ParseTuple(arguments, "iiiLO!O!", &epoll_fd, &timeout_ms, &most, &until_ns, &PyList_Type, &noticed,
                          &PyList_Type, &others))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    count = epoll_wait(epoll_fd, events, most < MOST_EVENTS ? most : MOST_EVENTS, timeout_ms);
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
        if (serve(self, &events[index], noticed, others, &read_ns) < 0)
            return NULL;
    }
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
    *found = (struct stream){NULL, NULL};
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
    self->streams[fd] = (struct stream){(Log *)Py_NewRef(log), Py_NewRef(owner)};
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

PyDoc_STRVAR(usual_doc,
"usual(reads, start, begin, after, counts) -> int\n\n"
"How many reads, from `start` on, are chunks whose texts alone are new, each `begin`, then characters that JSON\n"
"does not escape, then `after`, or have been found so before; how many there are in each goes to `counts`.");

static PyObject *
usual(PyObject *module, PyObject *arguments)
{
    PyObject *reads, *begin, *after, *counts;
    Py_ssize_t start, index;
    if (!PyArg_ParseTuple(arguments, "O!nSSO!", &PyList_Type, &reads, &start, &begin, &after, &PyList_Type, &counts))
        return NULL;
    if (start < 0)
        return PyErr_Format(PyExc_ValueError, "start is %zd", start);
    for (index = start; index < PyList_GET_SIZE(reads); index++) {
        PyObject *read = PyList_GET_ITEM(reads, index), *number;
        if (PyBytes_Check(read)) {
            Py_ssize_t known = PyBytes_GET_SIZE(begin);
            long count = known ? usual_chunks(PyBytes_AS_STRING(read), PyBytes_GET_SIZE(read), begin, after) : 0;
            if (count == 0)
                break;
            number = PyLong_FromLong(count);
        }
        else
            number = Py_NewRef(read);
        int failed = number == NULL || PyList_Append(counts, number) < 0;
        Py_XDECREF(number);
        if (failed)
            return NULL;
    }
    return PyLong_FromSsize_t(index - start);
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

static PyMethodDef log_methods[] = {
    {"add", (PyCFunction)log_add, METH_VARARGS, log_add_doc},
    {"expect", (PyCFunction)log_expect, METH_VARARGS, log_expect_doc},
    {"take", (PyCFunction)log_take, METH_VARARGS, log_take_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef log_properties[] = {
    {"reads", (getter)log_reads, NULL, "What was read and not taken, as a new list.", NULL},
    {"held", (getter)log_held, NULL, "About how many bytes of memory that takes.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot log_slots[] = {
    {Py_tp_doc, "What was read of a stream, and when; as loop.py's."},
    {Py_tp_new, log_new},
    {Py_tp_dealloc, log_dealloc},
    {Py_tp_methods, log_methods},
    {Py_tp_getset, log_properties},
    {Py_sq_length, log_length},
    {0, NULL},
};

static PyType_Spec log_spec = {
    .name = "kvbench.loadgen._reads.Log",
    .basicsize = sizeof(Log),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = log_slots,
};

static PyMethodDef streams_methods[] = {
    {"add", (PyCFunction)streams_add, METH_VARARGS, streams_add_doc},
    {"remove", (PyCFunction)streams_remove, METH_O, "remove(fd) -> None: before the descriptor is closed."},
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
    .name = "kvbench.loadgen._reads.Streams",
    .basicsize = sizeof(Streams),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = streams_slots,
};

static PyMethodDef methods[] = {
    {"gaps", gaps, METH_O, gaps_doc},
    {"set_timer", set_timer, METH_VARARGS, set_timer_doc},
    {"usual", usual, METH_VARARGS, usual_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvbench.loadgen._reads",
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
    log_type = (PyTypeObject *)add_type(module, &log_spec, "Log");
    if (log_type == NULL || add_type(module, &streams_spec, "Streams") == NULL)
        Py_CLEAR(module);
    return module;
}
