/* Queues played forwards (work to departures) and backwards (departures to work).

   Arrays are C doubles in order of arrival, in seconds; NaN is a departure that nobody saw. queues.py has the
   same functions in Python, with the same sums in the same order. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdlib.h>

#define NEVER 1e18

/* Puts a value in the place of the least one of a heap. */
static void
replace_least(double *heap, Py_ssize_t size, double value)
{
    Py_ssize_t at = 0;
    for (;;) {
        Py_ssize_t child = 2 * at + 1;
        if (child >= size)
            break;
        if (child + 1 < size && heap[child + 1] < heap[child])
            child++;
        if (heap[child] >= value)
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = value;
}

/* A heap of (key, request) for jobs that share a server. */
struct job {
    double key;
    Py_ssize_t index;
};

static int
before(struct job one, struct job other)
{
    return one.key < other.key || (one.key == other.key && one.index < other.index);
}

static void
push(struct job *heap, Py_ssize_t size, struct job job)
{
    Py_ssize_t at = size;
    while (at > 0 && before(job, heap[(at - 1) / 2])) {
        heap[at] = heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    heap[at] = job;
}

/* Takes the least one off a heap of that size. */
static void
pop(struct job *heap, Py_ssize_t size)
{
    struct job last = heap[size - 1];
    Py_ssize_t at = 0;
    size--;
    for (;;) {
        Py_ssize_t child = 2 * at + 1;
        if (child >= size)
            break;
        if (child + 1 < size && before(heap[child + 1], heap[child]))
            child++;
        if (!before(heap[child], last))
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = last;
}

static void
play_fifo(Py_ssize_t n, const double *arrived, const double *work, Py_ssize_t servers, double *departed, double *free)
{
    for (Py_ssize_t at = 0; at < servers; at++)
        free[at] = -NEVER;
    for (Py_ssize_t at = 0; at < n; at++) {
        double start = arrived[at] > free[0] ? arrived[at] : free[0];
        departed[at] = start + work[at];
        replace_least(free, servers, departed[at]);
    }
}

static void
unplay_fifo(Py_ssize_t n, const double *arrived, const double *departed, Py_ssize_t servers, double *work, double *free)
{
    for (Py_ssize_t at = 0; at < servers; at++)
        free[at] = -NEVER;
    for (Py_ssize_t at = 0; at < n; at++) {
        double until = isnan(departed[at]) ? NEVER : departed[at];
        double start = arrived[at] > free[0] ? arrived[at] : free[0];
        work[at] = until >= NEVER || free[0] >= NEVER ? NAN : until - start;
        replace_least(free, servers, until);
    }
}

/* Each of ``present`` jobs advances by 1 / (alone + each × (present − 1)) a second, or by servers / present of
   that where they are more than the servers. */
static void
play_shared(Py_ssize_t n, const double *arrived, const double *work, double servers, double alone, double each,
            double *departed, struct job *heap)
{
    Py_ssize_t present = 0, next = 0;
    double now = 0.0, clock = 0.0;
    while (next < n || present) {
        double speed = 1.0;
        if (present) {
            speed = 1.0 / (alone + each * (double)(present - 1));
            if ((double)present > servers)
                speed *= servers / (double)present;
        }
        double ends = present ? now + (heap[0].key - clock) / speed : NEVER;
        if (next < n && arrived[next] <= ends) {
            if (present)
                clock += (arrived[next] - now) * speed;
            now = arrived[next];
            push(heap, present++, (struct job){clock + work[next], next});
            next++;
        } else {
            clock = heap[0].key;
            now = ends;
            departed[heap[0].index] = now;
            pop(heap, present--);
        }
    }
}

/* One engine: prompts are computed one after another, and nobody decodes meanwhile; of ``present`` that decode
   each gets a token in alone + each × (present - 1) seconds. At most ``slots`` at once. */
static void
play_engine(Py_ssize_t n, const double *arrived, const double *prefill, const double *tokens, double alone,
            double each, Py_ssize_t slots, double *first, double *last, struct job *heap)
{
    Py_ssize_t present = 0, next = 0;
    double now = 0.0, clock = 0.0;
    while (next < n || present) {
        if (next < n && arrived[next] <= now && present < slots) {
            now += prefill[next];
            first[next] = now;
            push(heap, present++, (struct job){clock + tokens[next], next});
            next++;
            continue;
        }
        double step = alone + each * (double)(present - 1);
        double ends = present ? now + (heap[0].key - clock) * step : NEVER;
        if (next < n && present < slots && arrived[next] <= ends) {
            if (present)
                clock += (arrived[next] - now) / step;
            now = arrived[next];
        } else {
            clock = heap[0].key;
            now = ends;
            last[heap[0].index] = now;
            pop(heap, present--);
        }
    }
}

/* One engine that works in steps. Each computes at most ``prompts`` prompts (a part of one counts as such) of
   the requests that wait, at most ``slots`` at once, gives everybody who decodes a token, and lasts alone + each
   × (those who decode) + prefill × (prompts computed). The step that ends a prompt brings its first token. */
static void
play_steps(Py_ssize_t n, const double *arrived, const double *tokens, const double *parameters, double *first,
           double *last, struct job *heap)
{
    double alone = parameters[0], each = parameters[1], prefill = parameters[2], prompts = parameters[3];
    double slots = parameters[4];
    Py_ssize_t decoding = 0, next = 0, taken = 0; /* prompts before ``taken`` have been begun, before ``next`` ended */
    double now = 0.0, clock = 0.0, left = 0.0;    /* ``left`` of the prompt under way */
    while (next < n || decoding) {
        if (!decoding && taken == next && arrived[next] > now)
            now = arrived[next];
        double budget = prompts, computed = 0.0;
        Py_ssize_t ended = next;
        while (budget > 1e-9) {
            if (taken == ended) {
                if (taken == n || arrived[taken] > now || (double)(decoding + taken - next) >= slots)
                    break;
                left = 1.0;
                taken++;
            }
            double part = left < budget ? left : budget;
            left -= part;
            budget -= part;
            computed += part;
            if (left > 1e-9)
                break;
            ended++;
        }
        if (computed > 0.0) {
            now += alone + each * (double)decoding + prefill * computed;
            clock += 1.0;
        } else {
            /* Nothing changes until somebody comes or leaves: many steps at once. */
            double step = alone + each * (double)decoding;
            double steps = heap[0].key - clock;
            if (next < n && (double)decoding < slots) {
                double until = (arrived[next] - now) / step;
                if (until < steps)
                    steps = until;
            }
            steps = steps > 1.0 ? ceil(steps) : 1.0;
            clock += steps;
            now += steps * step;
        }
        while (decoding && heap[0].key <= clock) {
            last[heap[0].index] = now;
            pop(heap, decoding--);
        }
        for (; next < ended; next++) {
            first[next] = now;
            if (tokens[next] <= 0.0)
                last[next] = now;
            else
                push(heap, decoding++, (struct job){clock + tokens[next], next});
        }
    }
}

/* The same by several engines: request i goes to engine[i]. ``spare`` has 5 n doubles. */
static void
play_engines(Py_ssize_t n, const double *arrived, const double *tokens, const double *engine, Py_ssize_t engines,
             const double *parameters, double *first, double *last, struct job *heap, double *spare)
{
    double *arrivals = spare, *lengths = spare + n, *begun = spare + 2 * n, *ended = spare + 3 * n;
    double *own = spare + 4 * n;
    for (Py_ssize_t number = 0; number < engines; number++) {
        Py_ssize_t count = 0;
        for (Py_ssize_t at = 0; at < n; at++)
            if (engine[at] == (double)number) {
                arrivals[count] = arrived[at];
                lengths[count] = tokens[at];
                own[count++] = (double)at;
            }
        play_steps(count, arrivals, lengths, parameters, begun, ended, heap);
        for (Py_ssize_t at = 0; at < count; at++) {
            first[(Py_ssize_t)own[at]] = begun[at];
            last[(Py_ssize_t)own[at]] = ended[at];
        }
    }
}

#define MOST_BUFFERS 6

struct buffers {
    Py_buffer views[MOST_BUFFERS];
    int held;
    Py_ssize_t n;
};

static void
release(struct buffers *buffers)
{
    while (buffers->held)
        PyBuffer_Release(&buffers->views[--buffers->held]);
}

/* Takes ``count`` arrays of doubles of one length; the last ``written`` of them are written. */
static int
take(struct buffers *buffers, PyObject *const *objects, int count, int written)
{
    buffers->held = 0;
    for (int at = 0; at < count; at++) {
        int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (at >= count - written ? PyBUF_WRITABLE : 0);
        Py_buffer *view = &buffers->views[at];
        if (PyObject_GetBuffer(objects[at], view, flags) < 0) {
            release(buffers);
            return -1;
        }
        buffers->held++;
        if (view->itemsize != sizeof(double) || view->format == NULL || view->format[0] != 'd' ||
            view->len != buffers->views[0].len) {
            PyErr_SetString(PyExc_ValueError, "arrays of doubles of one length are needed");
            release(buffers);
            return -1;
        }
    }
    buffers->n = buffers->views[0].len / (Py_ssize_t)sizeof(double);
    return 0;
}

#define ARRAY(at) ((double *)buffers.views[at].buf)

static PyObject *
fifo_either_way(PyObject *args, int forwards)
{
    PyObject *objects[3];
    Py_ssize_t servers;
    struct buffers buffers;
    if (!PyArg_ParseTuple(args, "OOnO", &objects[0], &objects[1], &servers, &objects[2]))
        return NULL;
    if (servers < 1) {
        PyErr_SetString(PyExc_ValueError, "there must be a server");
        return NULL;
    }
    if (take(&buffers, objects, 3, 1) < 0)
        return NULL;
    double *free_s = malloc((size_t)servers * sizeof(double));
    if (free_s != NULL) {
        Py_BEGIN_ALLOW_THREADS
        (forwards ? play_fifo : unplay_fifo)(buffers.n, ARRAY(0), ARRAY(1), servers, ARRAY(2), free_s);
        Py_END_ALLOW_THREADS
        free(free_s);
    }
    release(&buffers);
    return free_s == NULL ? PyErr_NoMemory() : Py_NewRef(Py_None);
}

static PyObject *
fifo(PyObject *module, PyObject *args)
{
    (void)module;
    return fifo_either_way(args, 1);
}

static PyObject *
fifo_work(PyObject *module, PyObject *args)
{
    (void)module;
    return fifo_either_way(args, 0);
}

static PyObject *
shared(PyObject *module, PyObject *args)
{
    PyObject *objects[3];
    double servers, alone, each;
    struct buffers buffers;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOdddO", &objects[0], &objects[1], &servers, &alone, &each, &objects[2]))
        return NULL;
    if (take(&buffers, objects, 3, 1) < 0)
        return NULL;
    struct job *heap = malloc((size_t)(buffers.n + 1) * sizeof(struct job));
    if (heap != NULL) {
        Py_BEGIN_ALLOW_THREADS
        play_shared(buffers.n, ARRAY(0), ARRAY(1), servers, alone, each, ARRAY(2), heap);
        Py_END_ALLOW_THREADS
        free(heap);
    }
    release(&buffers);
    return heap == NULL ? PyErr_NoMemory() : Py_NewRef(Py_None);
}

static PyObject *
engine(PyObject *module, PyObject *args)
{
    PyObject *objects[5];
    double alone, each;
    Py_ssize_t slots;
    struct buffers buffers;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOddnOO", &objects[0], &objects[1], &objects[2], &alone, &each, &slots,
                          &objects[3], &objects[4]))
        return NULL;
    if (slots < 1) {
        PyErr_SetString(PyExc_ValueError, "there must be a slot");
        return NULL;
    }
    if (take(&buffers, objects, 5, 2) < 0)
        return NULL;
    struct job *heap = malloc((size_t)(buffers.n + 1) * sizeof(struct job));
    if (heap != NULL) {
        Py_BEGIN_ALLOW_THREADS
        play_engine(buffers.n, ARRAY(0), ARRAY(1), ARRAY(2), alone, each, slots, ARRAY(3), ARRAY(4), heap);
        Py_END_ALLOW_THREADS
        free(heap);
    }
    release(&buffers);
    return heap == NULL ? PyErr_NoMemory() : Py_NewRef(Py_None);
}

static PyObject *
steps(PyObject *module, PyObject *args)
{
    PyObject *objects[5];
    double parameters[5];
    Py_ssize_t engines;
    struct buffers buffers;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOndddddOO", &objects[0], &objects[1], &objects[2], &engines, &parameters[0],
                          &parameters[1], &parameters[2], &parameters[3], &parameters[4], &objects[3], &objects[4]))
        return NULL;
    if (!(parameters[0] > 0) || !(parameters[3] > 1e-6) || !(parameters[4] >= 1)) {
        PyErr_SetString(PyExc_ValueError, "a step must take time and prompts, and there must be a slot");
        return NULL;
    }
    if (take(&buffers, objects, 5, 2) < 0)
        return NULL;
    struct job *heap = malloc((size_t)(buffers.n + 1) * sizeof(struct job));
    double *spare = malloc((size_t)(5 * buffers.n + 1) * sizeof(double));
    PyObject *done = heap == NULL || spare == NULL ? PyErr_NoMemory() : Py_NewRef(Py_None);
    if (done != NULL) {
        Py_BEGIN_ALLOW_THREADS
        if (engines == 1)
            play_steps(buffers.n, ARRAY(0), ARRAY(1), parameters, ARRAY(3), ARRAY(4), heap);
        else
            play_engines(buffers.n, ARRAY(0), ARRAY(1), ARRAY(2), engines, parameters, ARRAY(3), ARRAY(4), heap,
                         spare);
        Py_END_ALLOW_THREADS
    }
    free(heap);
    free(spare);
    release(&buffers);
    return done;
}

static PyMethodDef methods[] = {
    {"steps", steps, METH_VARARGS,
     "steps(arrived, tokens, engine, engines, alone, each, prefill, prompts, slots, first, last): fills the last two."},
    {"fifo", fifo, METH_VARARGS, "fifo(arrived, work, servers, departed): fills departed."},
    {"fifo_work", fifo_work, METH_VARARGS, "fifo_work(arrived, departed, servers, work): fills work."},
    {"shared", shared, METH_VARARGS, "shared(arrived, work, servers, alone, each, departed): fills departed."},
    {"engine", engine, METH_VARARGS,
     "engine(arrived, prefill, tokens, alone, each, slots, first, last): fills first and last."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_queues", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC
PyInit__queues(void)
{
    return PyModule_Create(&module);
}
