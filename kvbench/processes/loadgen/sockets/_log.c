/* What was read of one stream (the Log of log.py), and the chunks whose bytes it need not keep. */

#include "_reads.h"

#include <string.h>

#define SLACK_NS 100000       /* as in clock.py */
#define LONGEST_NS INT32_MAX  /* as in clock.py */
#define KEPT_BYTES 32         /* of a read, besides its bytes: struct times and its place in the list */
#define CRC_32 0xedb88320u    /* zlib's polynomial, bits reversed */

struct log {
    PyObject_HEAD
    PyObject *reads; /* bytes of a read, or how many chunks as expected it brought */
    struct times *times;
    Py_ssize_t count, room;  /* of times: as many as reads, and as fit */
    Py_ssize_t bytes;        /* of the reads that are kept */
    PyObject *begin, *after; /* what is expected around a chunk's text; NULL: nothing */
    uint64_t text;           /* of the answer up to the last read that was as expected: as usual()'s `text` */
};

static const char USUAL_END[4] = {'\n', '\n', '\r', '\n'};

int
ends_as_usual(const char *data, Py_ssize_t size)
{
    return size >= 4 && memcmp(data + size - 4, USUAL_END, 4) == 0;
}

/* chunks that are known but for their text */

static uint32_t crc_table[256];

void
prepare_log(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t value = byte;
        for (int bit = 0; bit < 8; bit++)
            value = value & 1 ? value >> 1 ^ CRC_32 : value >> 1;
        crc_table[byte] = value;
    }
}

/* As zlib.crc32 of Python goes on from `crc`. */
static uint32_t
crc_on(uint32_t crc, const unsigned char *text, const unsigned char *end)
{
    for (crc = ~crc; text < end; text++)
        crc = crc_table[(crc ^ *text) & 0xff] ^ crc >> 8;
    return ~crc;
}

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

/* How many chunks a read brings if each is a size line, `begin`, plain text and `after`; else 0. An event without
   text is no token, and so not usual. `text` (CRC-32, and the length times 2^32) goes on over the texts. */
static long
usual_chunks(const char *data, Py_ssize_t bytes, PyObject *begin, PyObject *after, uint64_t *so_far)
{
    const char *end = data + bytes;
    Py_ssize_t begin_size = PyBytes_GET_SIZE(begin), after_size = PyBytes_GET_SIZE(after), size, line;
    long count = 0;
    uint32_t on = (uint32_t)*so_far;
    uint64_t length = *so_far >> 32;
    for (; data < end; data += size, count++) {
        line = size_line(data, end, &size);
        data += line;
        if (line == 0 || begin_size + after_size >= size || memcmp(data, PyBytes_AS_STRING(begin), begin_size) != 0 ||
            memcmp(data + size - after_size, PyBytes_AS_STRING(after), after_size) != 0)
            return 0;
        const unsigned char *text = (const unsigned char *)data + begin_size;
        const unsigned char *text_end = (const unsigned char *)data + size - after_size;
        if (!is_plain(text, text_end))
            return 0;
        on = crc_on(on, text, text_end);
        length += text_end - text;
    }
    *so_far = length << 32 | on;
    return count;
}

PyDoc_STRVAR(usual_doc,
"usual(reads, start, begin, after, counts, text) -> (int, text)\n\n"
"How many reads, from `start` on, are chunks whose texts alone are new, each `begin`, then characters that JSON\n"
"does not escape, at least one, then `after`, or have been found so before; how many there are in each goes to\n"
"`counts`. The texts' CRC-32 and length (CRC + length * 2**32) go on from `text`, without those that were found\n"
"so before.");

static PyObject *
usual(PyObject *module, PyObject *arguments)
{
    PyObject *reads, *begin, *after, *counts;
    Py_ssize_t start, index;
    unsigned long long given;
    if (!PyArg_ParseTuple(arguments, "O!nSSO!K", &PyList_Type, &reads, &start, &begin, &after, &PyList_Type, &counts,
                          &given))
        return NULL;
    uint64_t text = given;
    if (start < 0)
        return PyErr_Format(PyExc_ValueError, "start is %zd", start);
    for (index = start; index < PyList_GET_SIZE(reads); index++) {
        PyObject *read = PyList_GET_ITEM(reads, index), *number;
        if (PyBytes_Check(read)) {
            Py_ssize_t known = PyBytes_GET_SIZE(begin);
            long count =
                known ? usual_chunks(PyBytes_AS_STRING(read), PyBytes_GET_SIZE(read), begin, after, &text) : 0;
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
    return Py_BuildValue("nK", index - start, (unsigned long long)text);
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

int
keep_read(Log *self, const char *data, Py_ssize_t size, const struct times *times, PyObject **kept)
{
    *kept = NULL;
    if (self->begin != NULL) {
        long chunks = usual_chunks(data, size, self->begin, self->after, &self->text);
        if (chunks > 0)
            return note(self, PyLong_FromLong(chunks), times);
        expect_nothing(self);
    }
    PyObject *bytes = PyBytes_FromStringAndSize(data, size);
    if (bytes == NULL || note(self, Py_NewRef(bytes), times) < 0) {
        Py_XDECREF(bytes);
        return -1;
    }
    self->bytes += size;
    *kept = bytes;
    return 0;
}

PyDoc_STRVAR(log_add_doc,
"add(data, stamp, read_ns, since_ns=read_ns) -> None\n\n"
"A read, with the kernel's ``struct scm_timestamping`` (or zeros). Nothing is expected any more.");

static PyObject *
log_add(Log *self, PyObject *arguments)
{
    PyObject *data;
    const char *stamp;
    Py_ssize_t stamp_bytes;
    long long read_ns, since_ns = INT64_MAX;
    int64_t timespec[2];
    if (!PyArg_ParseTuple(arguments, "Sy#L|L", &data, &stamp, &stamp_bytes, &read_ns, &since_ns))
        return NULL;
    if (stamp_bytes < (Py_ssize_t)sizeof timespec)
        return PyErr_Format(PyExc_ValueError, "a stamp of %zd bytes", stamp_bytes);
    memcpy(timespec, stamp, sizeof timespec);
    struct times times = {timespec[0] * 1000000000 + timespec[1], read_ns, since_ns};
    expect_nothing(self);
    if (keep_read(self, PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data), &times, &data) < 0)
        return NULL;
    Py_DECREF(data);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(log_expect_doc,
"expect(begin, after, text) -> None\n\n"
"The next byte begins a chunk. A read in which each chunk is ``begin``, characters that JSON does not escape (one\n"
"at least) and ``after`` is from now on kept as their number alone, until a read comes that is not; the CRC-32 of\n"
"the text, and 2**32 times its length, go on from ``text``.");

static PyObject *
log_expect(Log *self, PyObject *arguments)
{
    PyObject *begin, *after;
    unsigned long long text;
    if (!PyArg_ParseTuple(arguments, "SSK", &begin, &after, &text))
        return NULL;
    if (!ends_as_usual(PyBytes_AS_STRING(after), PyBytes_GET_SIZE(after))) {
        PyErr_SetString(PyExc_ValueError, "a chunk of an event ends with two line feeds and CRLF");
        return NULL;
    }
    Py_XSETREF(self->begin, Py_NewRef(begin));
    Py_XSETREF(self->after, Py_NewRef(after));
    self->text = text;
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

static int32_t
clipped(int64_t time_ns)
{
    return time_ns < 0 ? 0 : time_ns < LONGEST_NS ? (int32_t)time_ns : LONGEST_NS;
}

/* clock.py's arrivals: when bytes came (int64 each), how long they lay, and how much earlier some of them may have
   come (int32 each). How many stamps are useless. */
static long
arrivals(const struct times *times, Py_ssize_t count, int64_t sent_ns, int64_t offset_ns, char *came, char *lags,
         char *doubts)
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
        int64_t since_ns = times[index].since_ns > sent_ns ? times[index].since_ns : sent_ns;
        int32_t lag_ns = clipped(read_ns - came_ns), doubt_ns = since_ns < came_ns ? clipped(came_ns - since_ns) : 0;
        memcpy(came + index * sizeof came_ns, &came_ns, sizeof came_ns);
        memcpy(lags + index * sizeof lag_ns, &lag_ns, sizeof lag_ns);
        memcpy(doubts + index * sizeof doubt_ns, &doubt_ns, sizeof doubt_ns);
    }
    return useless;
}

PyDoc_STRVAR(log_take_doc,
"take(most, sent_ns, offset_ns) -> (reads, came, lags, doubts, useless, text)\n\n"
"Takes the first reads out, at most so many: bytes, or a number of expected chunks; then as clock.arrivals, and\n"
"the text's CRC-32, and 2**32 times its length, up to the last read that was as expected.");

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
    PyObject *doubts = PyBytes_FromStringAndSize(NULL, count * sizeof(int32_t));
    PyObject *reads = came != NULL && lags != NULL && doubts != NULL ? take_reads(self, count) : NULL;
    if (reads == NULL) {
        Py_XDECREF(came);
        Py_XDECREF(lags);
        Py_XDECREF(doubts);
        return NULL;
    }
    long useless = arrivals(self->times, count, sent_ns, offset_ns, PyBytes_AS_STRING(came), PyBytes_AS_STRING(lags),
                            PyBytes_AS_STRING(doubts));
    self->count -= count;
    if (self->count > 0)
        memmove(self->times, self->times + count, self->count * sizeof *self->times);
    return Py_BuildValue("NNNNlK", reads, came, lags, doubts, useless, (unsigned long long)self->text);
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

PyType_Spec log_spec = {
    .name = "kvbench.processes.loadgen.sockets._reads.Log",
    .basicsize = sizeof(Log),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = log_slots,
};

PyMethodDef log_functions[] = {
    {"usual", usual, METH_VARARGS, usual_doc},
    {NULL, NULL, 0, NULL},
};
