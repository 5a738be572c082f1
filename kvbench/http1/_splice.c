/* A router's hot path, compiled: the usual chunks of a stream, from one socket to another.

   A stream is here only while all is as usual: whole size lines, a client that keeps up. Whatever else comes
   gives the stream back to Python with the bytes that were read or are left to send, and Python judges: the
   rules of the framing (framing.py) and of slow clients (connection.py) are there alone. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <limits.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define EVENTS_AT_ONCE 16 /* about 0.15 ms of work, for which requests may wait */
#define READ_BYTES 65536
#define MOST_DIGITS 7 /* of a chunk's size: longer lines are Python's */

/* One stream on its way. */
struct pair {
    int target;
    Py_ssize_t left; /* as in framing.py: bytes until the next size line */
    Py_ssize_t reads, bytes;
    PyObject *give_back;
};

typedef struct {
    PyObject_HEAD
    int epoll;
    int size;            /* of the table */
    struct pair **pairs; /* by the descriptor that is read */
} Splicer;

/* One buffer for all: the GIL is held from the reading to the sending. */
static char buffer[READ_BYTES];

static int
hex_digit(char letter)
{
    if (letter >= '0' && letter <= '9')
        return letter - '0';
    letter |= 0x20;
    return letter >= 'a' && letter <= 'f' ? letter - 'a' + 10 : -1;
}

/* Whether a chunk that ends at `at` ends with CRLF, as far as that has come: data[:end]; framing.py's _check_end. */
static int
ends_well(const char *data, Py_ssize_t at, Py_ssize_t end)
{
    if (at > end)
        return at - end > 1 || data[end - 1] == '\r';
    return data[at - 1] == '\n' && (at < 2 || data[at - 2] == '\r');
}

/* ChunkWatch.feed for a read of plain chunks only. What is left of the last chunk; -1 if the read is another. */
static Py_ssize_t
follow(const char *data, Py_ssize_t end, Py_ssize_t left)
{
    Py_ssize_t at = left;
    if (at > 0 && !ends_well(data, at, end))
        return -1;
    while (at < end) {
        Py_ssize_t size = 0, start = at;
        int digit;
        while (at < end && at - start < MOST_DIGITS && (digit = hex_digit(data[at])) >= 0) {
            size = size * 16 + digit;
            at++;
        }
        if (size == 0 || end - at < 2 || data[at] != '\r' || data[at + 1] != '\n')
            return -1;
        at += size + 4;
        if (!ends_well(data, at, end))
            return -1;
    }
    return at - end;
}

static struct pair *
pair_of(Splicer *self, int fd)
{
    return fd >= 0 && fd < self->size ? self->pairs[fd] : NULL;
}

/* Takes a pair out; the caller frees it. */
static struct pair *
take_out(Splicer *self, int fd)
{
    struct pair *pair = pair_of(self, fd);
    if (pair != NULL) {
        self->pairs[fd] = NULL;
        epoll_ctl(self->epoll, EPOLL_CTL_DEL, fd, NULL); /* fails for a descriptor that was closed: it is out */
    }
    return pair;
}

static void
drop(struct pair *pair)
{
    PyObject *give_back = pair->give_back;
    PyMem_Free(pair);
    Py_DECREF(give_back);
}

/* Tells Python that the stream is its own again; what is told is in the doc of Splicer. Frees the pair. */
static void
hand_over(struct pair *pair, const char *read, Py_ssize_t read_bytes, const char *unsent, Py_ssize_t unsent_bytes)
{
    PyObject *told = PyObject_CallFunction(pair->give_back, "nnny#y#", pair->left, pair->reads, pair->bytes, read,
                                           read_bytes, unsent, unsent_bytes);
    if (told == NULL)
        PyErr_WriteUnraisable(pair->give_back);
    Py_XDECREF(told);
    drop(pair);
}

/* One read of a stream, passed on if it is a usual one. */
static void
pass_on(Splicer *self, int fd, struct pair *pair, uint32_t events)
{
    if (events != EPOLLIN) { /* it is broken: how, its owner reads for itself */
        hand_over(take_out(self, fd), buffer, 0, buffer, 0);
        return;
    }
    ssize_t count = recv(fd, buffer, sizeof buffer, MSG_DONTWAIT);
    if (count < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (count <= 0) {
        hand_over(take_out(self, fd), buffer, 0, buffer, 0);
        return;
    }
    Py_ssize_t left = follow(buffer, count, pair->left);
    if (left < 0) {
        hand_over(take_out(self, fd), buffer, count, buffer, 0);
        return;
    }
    pair->left = left;
    pair->reads++;
    pair->bytes += count;
    ssize_t sent = send(pair->target, buffer, count, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < count) {
        sent = sent < 0 ? 0 : sent; /* why, the target's owner finds out when it tries again */
        hand_over(take_out(self, fd), buffer, 0, buffer + sent, count - sent);
    }
}

PyDoc_STRVAR(turn_doc,
"turn() -> None\n\n"
"Passes on what has come, without waiting. To be called when ``fileno()`` is readable.");

static PyObject *
splicer_turn(Splicer *self, PyObject *unused)
{
    struct epoll_event events[EVENTS_AT_ONCE];
    int count = epoll_wait(self->epoll, events, EVENTS_AT_ONCE, 0);
    if (count < 0 && errno != EINTR)
        return PyErr_SetFromErrno(PyExc_OSError);
    for (int index = 0; index < count; index++) {
        /* Looked up each time: what was told of another stream may have taken this one out. */
        struct pair *pair = pair_of(self, events[index].data.fd);
        if (pair != NULL)
            pass_on(self, events[index].data.fd, pair, events[index].events);
    }
    Py_RETURN_NONE;
}

/* Makes the table large enough for a descriptor. 0, or -1 with an exception. */
static int
make_room(Splicer *self, int fd)
{
    if (fd < self->size)
        return 0;
    int size = self->size > 0 ? self->size : 64;
    while (size <= fd)
        size *= 2;
    struct pair **pairs = PyMem_Realloc(self->pairs, size * sizeof *pairs);
    if (pairs == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    memset(pairs + self->size, 0, (size - self->size) * sizeof *pairs);
    self->pairs = pairs;
    self->size = size;
    return 0;
}

PyDoc_STRVAR(add_doc,
"add(source, target, left, give_back) -> None\n\n"
"From now on the stream that is read from ``source`` goes to ``target``. Nobody else may read the one or write\n"
"to the other before ``give_back`` was called or the stream was removed. ``left`` is as in ChunkWatch.");

static PyObject *
splicer_add(Splicer *self, PyObject *arguments)
{
    int source, target;
    Py_ssize_t left;
    PyObject *give_back;
    if (!PyArg_ParseTuple(arguments, "iinO", &source, &target, &left, &give_back))
        return NULL;
    if (source < 0 || target < 0 || left < 0 || pair_of(self, source) != NULL) {
        PyErr_Format(PyExc_ValueError, "descriptors %d and %d, %zd bytes left", source, target, left);
        return NULL;
    }
    if (make_room(self, source) < 0)
        return NULL;
    struct epoll_event event = {.events = EPOLLIN, .data.fd = source};
    if (epoll_ctl(self->epoll, EPOLL_CTL_ADD, source, &event) < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    struct pair *pair = PyMem_Malloc(sizeof *pair);
    if (pair == NULL) {
        epoll_ctl(self->epoll, EPOLL_CTL_DEL, source, NULL);
        return PyErr_NoMemory();
    }
    *pair = (struct pair){.target = target, .left = left, .give_back = Py_NewRef(give_back)};
    self->pairs[source] = pair;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(remove_doc,
"remove(source) -> (left, reads, bytes) | None\n\n"
"The stream is its owner's again, who is not told; None if it was already. Before the descriptor is closed.");

static PyObject *
splicer_remove(Splicer *self, PyObject *source)
{
    long fd = PyLong_AsLong(source);
    if (fd == -1 && PyErr_Occurred())
        return NULL;
    struct pair *pair = fd < 0 || fd > INT_MAX ? NULL : take_out(self, (int)fd);
    if (pair == NULL)
        Py_RETURN_NONE;
    PyObject *found = Py_BuildValue("nnn", pair->left, pair->reads, pair->bytes);
    drop(pair);
    return found;
}

static void
close_all(Splicer *self)
{
    for (int fd = 0; fd < self->size; fd++) {
        struct pair *pair = take_out(self, fd);
        if (pair != NULL)
            drop(pair);
    }
    if (self->epoll >= 0)
        close(self->epoll);
    self->epoll = -1;
}

static PyObject *
splicer_close(Splicer *self, PyObject *unused)
{
    close_all(self);
    Py_RETURN_NONE;
}

static PyObject *
splicer_fileno(Splicer *self, PyObject *unused)
{
    return PyLong_FromLong(self->epoll);
}

static PyObject *
splicer_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    Splicer *self = (Splicer *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (self->epoll < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

/* Streams refer to their owners, and these may refer back. */
static int
splicer_traverse(Splicer *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    for (int fd = 0; fd < self->size; fd++)
        if (self->pairs[fd] != NULL)
            Py_VISIT(self->pairs[fd]->give_back);
    return 0;
}

static int
splicer_clear(Splicer *self)
{
    close_all(self);
    return 0;
}

static void
splicer_dealloc(Splicer *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    close_all(self);
    PyMem_Free(self->pairs);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef splicer_methods[] = {
    {"add", (PyCFunction)splicer_add, METH_VARARGS, add_doc},
    {"close", (PyCFunction)splicer_close, METH_NOARGS, "Drops all streams, untold, and the epoll descriptor."},
    {"fileno", (PyCFunction)splicer_fileno, METH_NOARGS, "The epoll descriptor: readable when a turn is due."},
    {"remove", (PyCFunction)splicer_remove, METH_O, remove_doc},
    {"turn", (PyCFunction)splicer_turn, METH_NOARGS, turn_doc},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(splicer_doc,
"Passes streams in chunks on from socket to socket, until it is closed.\n\n"
"A stream that is not as usual any more is taken out, and its ``give_back(left, reads, bytes, read, unsent)`` is\n"
"called: what is left of the chunk under way before ``read``; how many reads and bytes were passed on here, those\n"
"in ``unsent`` with them; bytes that were read and not judged; bytes to be sent before any others.");

static PyType_Slot splicer_slots[] = {
    {Py_tp_doc, (void *)splicer_doc},
    {Py_tp_new, splicer_new},
    {Py_tp_methods, splicer_methods},
    {Py_tp_traverse, splicer_traverse},
    {Py_tp_clear, splicer_clear},
    {Py_tp_dealloc, splicer_dealloc},
    {0, NULL},
};

static PyType_Spec splicer_spec = {
    .name = "kvbench.http1._splice.Splicer",
    .basicsize = sizeof(Splicer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = splicer_slots,
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvbench.http1._splice",
    .m_doc = "A router's hot path, compiled.",
    .m_size = -1,
};

PyMODINIT_FUNC
PyInit__splice(void)
{
    PyObject *module = PyModule_Create(&definition);
    PyObject *type = module == NULL ? NULL : PyType_FromSpec(&splicer_spec);
    if (type == NULL || PyModule_AddObject(module, "Splicer", type) < 0) {
        Py_XDECREF(type);
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
