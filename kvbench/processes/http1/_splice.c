/* A router's hot path, compiled: the usual chunks of a stream, from one socket to another.

   A stream is here only while all is as usual: whole size lines, a client that keeps up. Whatever else comes
   gives the stream back to Python with the bytes that were read or are left to send, and Python judges: the
   rules of the framing (framing.py) and of slow clients (connection.py) are there alone.

   A thread of its own does it, which never takes the GIL nor touches a Python object: requests do not wait
   behind chunks, nor chunks behind Python. It moves streams from the table to the queue of what is given back;
   all else is done by the event loop's thread, in `add`, `remove`, `collect` and `close`. While the lock is held
   nothing may run that could collect garbage, as `traverse` takes it. */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EVENTS_AT_ONCE 64
#define READ_BYTES 65536
#define MOST_DIGITS 7 /* of a chunk's size: longer lines are Python's */
#define MOST_DESCRIPTOR (1 << 24) /* the table has a place for each below it */
#define INTEREST (EPOLLIN | EPOLLRDHUP | EPOLLET)

/* One stream on its way. */
struct pair {
    struct pair *next; /* in the queue */
    int source, target;
    Py_ssize_t left; /* as in framing.py: bytes until the next size line */
    Py_ssize_t reads, bytes;
    PyObject *give_back;
    const char *rest; /* once it is given back: what was read, or what could not be sent */
    Py_ssize_t read_bytes, unsent_bytes;
};

typedef struct {
    PyObject_HEAD
    int epoll;
    int wakeup; /* an eventfd: something is in the queue */
    int ended;  /* an eventfd: the thread is to end */
    int running;
    pthread_t thread;
    pthread_mutex_t lock; /* of all below, and held from the look-up of a stream to its sending */
    int size;             /* of the table */
    struct pair **pairs;  /* by the descriptor that is read */
    struct pair *first, **last; /* the queue */
} Splicer;

/* What is given back in place of bytes for which there is no memory: no chunk, so that the stream fails. */
static const char no_chunk[1] = {0};

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

/* Takes a pair out; the caller frees or queues it. */
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

/* The thread */

/* Puts a stream into the queue, with the bytes that Python is to see or to send. */
static void
give_back(Splicer *self, struct pair *pair, const char *rest, Py_ssize_t read_bytes, Py_ssize_t unsent_bytes)
{
    take_out(self, pair->source);
    Py_ssize_t size = read_bytes + unsent_bytes;
    char *copy = size > 0 ? PyMem_RawMalloc(size) : NULL;
    if (size > 0 && copy == NULL) {
        rest = no_chunk;
        pair->left = unsent_bytes = 0;
        read_bytes = sizeof no_chunk;
    }
    else if (size > 0)
        rest = memcpy(copy, rest, size);
    pair->rest = rest;
    pair->read_bytes = read_bytes;
    pair->unsent_bytes = unsent_bytes;
    pair->next = NULL;
    if (self->first == NULL)
        eventfd_write(self->wakeup, 1);
    *self->last = pair;
    self->last = &pair->next;
}

/* What has come for a stream, passed on if it is usual. As events tell what is new only, all must be read. */
static void
pass_on(Splicer *self, struct pair *pair, uint32_t events, char *buffer)
{
    if (events != EPOLLIN) { /* it ends or is broken: how, its owner reads for itself */
        give_back(self, pair, NULL, 0, 0);
        return;
    }
    ssize_t count;
    do {
        count = recv(pair->source, buffer, READ_BYTES, MSG_DONTWAIT);
        if (count < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (count <= 0) {
            give_back(self, pair, NULL, 0, 0);
            return;
        }
        Py_ssize_t left = follow(buffer, count, pair->left);
        if (left < 0) {
            give_back(self, pair, buffer, count, 0);
            return;
        }
        pair->left = left;
        pair->reads++;
        pair->bytes += count;
        ssize_t sent = send(pair->target, buffer, count, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < count) { /* why, the target's owner finds out when it tries again */
            sent = sent < 0 ? 0 : sent;
            give_back(self, pair, buffer + sent, 0, count - sent);
            return;
        }
    } while (count == READ_BYTES);
}

/* Requests go first: when their thread wakes, it takes the core from this one, which has a usual slice (a router
   has a short one: common/entry.py) and takes the core from nobody. What comes meanwhile is passed on in one
   go. */
static void
give_way(void)
{
#ifdef SYS_sched_setattr
    struct { /* the first version of linux/sched/types.h's sched_attr */
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t slice, deadline, period;
    } wanted = {.size = sizeof wanted, .policy = SCHED_BATCH, .nice = getpriority(PRIO_PROCESS, 0)};
    if (sched_getscheduler(0) == SCHED_OTHER)
        syscall(SYS_sched_setattr, 0, &wanted, 0); /* where it is refused, all is right but a little slower */
#endif
}

static void *
work(void *argument)
{
    Splicer *self = argument;
    struct epoll_event events[EVENTS_AT_ONCE];
    char buffer[READ_BYTES];
    give_way();
    for (;;) {
        int count = epoll_wait(self->epoll, events, EVENTS_AT_ONCE, -1);
        if (count < 0 && errno != EINTR)
            return NULL;
        for (int index = 0; index < count; index++) {
            int fd = events[index].data.fd;
            if (fd == self->ended)
                return NULL;
            /* Looked up under the lock, and let go after each: what was removed is touched no more. */
            pthread_mutex_lock(&self->lock);
            struct pair *pair = pair_of(self, fd);
            if (pair != NULL)
                pass_on(self, pair, events[index].events, buffer);
            pthread_mutex_unlock(&self->lock);
        }
    }
}

/* 0, or an error's number. The thread hears no signal: they are the interpreter's. */
static int
start(Splicer *self)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&self->thread, NULL, work, self);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    self->running = error == 0;
    if (self->running)
        pthread_setname_np(self->thread, "splice");
    return error;
}

/* The event loop's side */

/* The GIL is let go of only if it takes a moment, and never waited for with the lock held: whoever has it may
   collect garbage, and `traverse` waits for the lock. */
static void
lock(Splicer *self)
{
    while (pthread_mutex_trylock(&self->lock) != 0) {
        Py_BEGIN_ALLOW_THREADS
        pthread_mutex_lock(&self->lock);
        pthread_mutex_unlock(&self->lock);
        Py_END_ALLOW_THREADS
    }
}

static void
unlock(Splicer *self)
{
    pthread_mutex_unlock(&self->lock);
}

static void
drop(struct pair *pair)
{
    PyObject *callback = pair->give_back;
    if (pair->rest != no_chunk)
        PyMem_RawFree((void *)pair->rest);
    PyMem_RawFree(pair);
    Py_DECREF(callback);
}

/* The first of the queue, or NULL. */
static struct pair *
pop(Splicer *self)
{
    lock(self);
    struct pair *pair = self->first;
    if (pair != NULL) {
        self->first = pair->next;
        if (self->first == NULL)
            self->last = &self->first;
    }
    unlock(self);
    return pair;
}

PyDoc_STRVAR(collect_doc,
"collect() -> None\n\n"
"Calls ``give_back`` for each stream that was given back. To be called when ``fileno()`` is readable.");

static PyObject *
splicer_collect(Splicer *self, PyObject *unused)
{
    eventfd_t ignored;
    if (eventfd_read(self->wakeup, &ignored) < 0 && errno != EAGAIN)
        return PyErr_SetFromErrno(PyExc_OSError);
    struct pair *pair;
    /* One at a time: what is given back of one stream may remove another. */
    while ((pair = pop(self)) != NULL) {
        const char *unsent = pair->rest == NULL ? NULL : pair->rest + pair->read_bytes;
        PyObject *result = PyObject_CallFunction(pair->give_back, "nnny#y#", pair->left, pair->reads, pair->bytes,
                                                 pair->rest == NULL ? "" : pair->rest, pair->read_bytes,
                                                 unsent == NULL ? "" : unsent, pair->unsent_bytes);
        if (result == NULL)
            PyErr_WriteUnraisable(pair->give_back);
        Py_XDECREF(result);
        drop(pair);
    }
    Py_RETURN_NONE;
}

/* Makes the table large enough for a descriptor. 0, or -1 if there is no memory. */
static int
make_room(Splicer *self, int fd)
{
    if (fd < self->size)
        return 0;
    int size = self->size > 0 ? self->size : 64;
    while (size <= fd)
        size *= 2;
    struct pair **pairs = PyMem_RawRealloc(self->pairs, size * sizeof *pairs);
    if (pairs == NULL)
        return -1;
    memset(pairs + self->size, 0, (size - self->size) * sizeof *pairs);
    self->pairs = pairs;
    self->size = size;
    return 0;
}

/* Puts a pair into the table and under watch. 0, or an error's number. */
static int
put_in(Splicer *self, struct pair *pair)
{
    if (pair_of(self, pair->source) != NULL)
        return EEXIST;
    if (make_room(self, pair->source) < 0)
        return ENOMEM;
    struct epoll_event event = {.events = INTEREST, .data.fd = pair->source};
    if (epoll_ctl(self->epoll, EPOLL_CTL_ADD, pair->source, &event) < 0)
        return errno;
    self->pairs[pair->source] = pair;
    return 0;
}

PyDoc_STRVAR(add_doc,
"add(source, target, left, give_back) -> None\n\n"
"From now on the stream that is read from ``source`` goes to ``target``. Nobody else may read the one or write\n"
"to the other before ``give_back`` was called or the stream was removed. ``left`` is as in ChunkWatch.");

static PyObject *
splicer_add(Splicer *self, PyObject *arguments)
{
    struct pair wanted = {0};
    if (!PyArg_ParseTuple(arguments, "iinO", &wanted.source, &wanted.target, &wanted.left, &wanted.give_back))
        return NULL;
    if (wanted.source < 0 || wanted.source > MOST_DESCRIPTOR || wanted.target < 0 || wanted.left < 0)
        return PyErr_Format(PyExc_ValueError, "descriptors %d and %d, %zd bytes left", wanted.source,
                            wanted.target, wanted.left);
    struct pair *pair = PyMem_RawMalloc(sizeof *pair);
    if (pair == NULL)
        return PyErr_NoMemory();
    *pair = wanted;
    Py_INCREF(pair->give_back);
    lock(self);
    int error = put_in(self, pair);
    unlock(self);
    if (error == 0)
        Py_RETURN_NONE;
    drop(pair);
    if (error == ENOMEM)
        return PyErr_NoMemory();
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

/* Takes a pair out of the queue, if it is there. */
static struct pair *
unqueue(Splicer *self, int fd)
{
    for (struct pair **at = &self->first; *at != NULL; at = &(*at)->next) {
        struct pair *pair = *at;
        if (pair->source != fd)
            continue;
        *at = pair->next;
        if (self->last == &pair->next)
            self->last = at;
        return pair;
    }
    return NULL;
}

PyDoc_STRVAR(remove_doc,
"remove(source) -> (left, reads, bytes) | None\n\n"
"The stream is its owner's again, whose ``give_back`` will not be called; None if it was already. Before either\n"
"descriptor is closed. Bytes that are on their way to ``give_back`` are lost: for who gives the stream up.");

static PyObject *
splicer_remove(Splicer *self, PyObject *source)
{
    long fd = PyLong_AsLong(source);
    if (fd == -1 && PyErr_Occurred())
        return NULL;
    if (fd < 0 || fd > INT_MAX)
        Py_RETURN_NONE;
    lock(self);
    struct pair *pair = take_out(self, (int)fd);
    if (pair == NULL)
        pair = unqueue(self, (int)fd);
    unlock(self);
    if (pair == NULL)
        Py_RETURN_NONE;
    PyObject *found = Py_BuildValue("nnn", pair->left, pair->reads, pair->bytes);
    drop(pair);
    return found;
}

static void
close_descriptor(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

/* The thread has ended when this returns: it needs no GIL for that, and never waits for anything but epoll. */
static void
close_all(Splicer *self)
{
    if (self->running) {
        eventfd_write(self->ended, 1);
        pthread_join(self->thread, NULL);
        self->running = 0;
    }
    close_descriptor(&self->epoll);
    /* Each is out of all before its callback goes, which may come back here. */
    struct pair *pair;
    for (int fd = 0; fd < self->size; fd++)
        if ((pair = take_out(self, fd)) != NULL)
            drop(pair);
    while ((pair = pop(self)) != NULL)
        drop(pair);
    close_descriptor(&self->wakeup);
    close_descriptor(&self->ended);
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
    return PyLong_FromLong(self->wakeup);
}

/* 0, or an error's number. */
static int
open_all(Splicer *self)
{
    self->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (self->epoll < 0)
        return errno;
    self->wakeup = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    self->ended = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = self->ended};
    if (self->wakeup < 0 || self->ended < 0 || epoll_ctl(self->epoll, EPOLL_CTL_ADD, self->ended, &event) < 0)
        return errno;
    return start(self);
}

static PyObject *
splicer_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    Splicer *self = (Splicer *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->epoll = self->wakeup = self->ended = -1;
    self->last = &self->first;
    pthread_mutex_init(&self->lock, NULL);
    int error = open_all(self);
    if (error != 0) {
        Py_DECREF(self);
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return (PyObject *)self;
}

/* Streams refer to their owners, and these may refer back. */
static int
splicer_traverse(Splicer *self, visitproc visit, void *arg)
{
    int stop = 0;
    Py_VISIT(Py_TYPE(self));
    pthread_mutex_lock(&self->lock);
    for (int fd = 0; fd < self->size && stop == 0; fd++)
        if (self->pairs[fd] != NULL)
            stop = visit(self->pairs[fd]->give_back, arg);
    for (struct pair *pair = self->first; pair != NULL && stop == 0; pair = pair->next)
        stop = visit(pair->give_back, arg);
    pthread_mutex_unlock(&self->lock);
    return stop;
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
    pthread_mutex_destroy(&self->lock);
    PyMem_RawFree(self->pairs);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef splicer_methods[] = {
    {"add", (PyCFunction)splicer_add, METH_VARARGS, add_doc},
    {"close", (PyCFunction)splicer_close, METH_NOARGS, "Ends the thread; drops all streams, untold."},
    {"collect", (PyCFunction)splicer_collect, METH_NOARGS, collect_doc},
    {"fileno", (PyCFunction)splicer_fileno, METH_NOARGS, "A descriptor: readable when there is something to collect."},
    {"remove", (PyCFunction)splicer_remove, METH_O, remove_doc},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(splicer_doc,
"Passes streams in chunks on from socket to socket, on a thread of its own, until it is closed.\n\n"
"A stream that is not as usual any more is taken out, and ``collect`` calls its ``give_back(left, reads, bytes,\n"
"read, unsent)``: what is left of the chunk under way before ``read``; how many reads and bytes were passed on\n"
"here, those in ``unsent`` with them; bytes that were read and not judged; bytes to be sent before any others.");

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
    .name = "kvbench.processes.http1._splice.Splicer",
    .basicsize = sizeof(Splicer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = splicer_slots,
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvbench.processes.http1._splice",
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
