/* Usual heads of requests and answers, read in one go.

   Strict: what is not plainly usual (odd letters, repeated or empty headers, a header that changes how the
   connection or the body is to be understood, a request whose body has not come whole) is None here and
   httptools' to judge. What is taken is taken as httptools would take it. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string.h>

#define MOST_HEAD_BYTES 16384
#define MOST_NAME_BYTES 64
#define MOST_DIGITS 8 /* of a body's length */

/* What the headers say of the body. */
struct framing {
    Py_ssize_t length; /* -1: not said */
    int chunked;
};

static int
is(const char *name, Py_ssize_t size, const char *known)
{
    return (size_t)size == strlen(known) && memcmp(name, known, size) == 0;
}

/* A decimal number of the whole of a value; -1 if it is none or has too many digits. */
static Py_ssize_t
number(const char *value, Py_ssize_t size)
{
    Py_ssize_t found = 0;
    if (size < 1 || size > MOST_DIGITS)
        return -1;
    for (Py_ssize_t at = 0; at < size; at++) {
        if (value[at] < '0' || value[at] > '9')
            return -1;
        found = found * 10 + value[at] - '0';
    }
    return found;
}

/* Notes a header that says something of the body. Whether it is a usual one. */
static int
note(struct framing *framing, const char *name, Py_ssize_t name_size, const char *value, Py_ssize_t size)
{
    if (is(name, name_size, "content-length"))
        return (framing->length = number(value, size)) >= 0;
    if (is(name, name_size, "transfer-encoding"))
        return framing->chunked = is(value, size, "chunked");
    return !is(name, name_size, "connection") && !is(name, name_size, "proxy-connection") &&
           !is(name, name_size, "upgrade") && !is(name, name_size, "expect");
}

/* Copies a header's name in lower case up to the colon. Its size; -1 for an unusual one. */
static Py_ssize_t
take_name(const char *at, const char *end, char *name)
{
    Py_ssize_t size = 0;
    for (; at < end && *at != ':'; at++) {
        char letter = *at >= 'A' && *at <= 'Z' ? *at | 0x20 : *at;
        if (size == MOST_NAME_BYTES || !((letter >= 'a' && letter <= 'z') || (letter >= '0' && letter <= '9') ||
                                         letter == '-' || letter == '_'))
            return -1;
        name[size++] = letter;
    }
    return at < end && size > 0 ? size : -1;
}

/* The first byte that is not printable ASCII. */
static const char *
printable(const char *at, const char *end)
{
    while (at < end && *at >= 0x20 && *at <= 0x7e)
        at++;
    return at;
}

static int
ends_line(const char *at, const char *end)
{
    return end - at >= 2 && at[0] == '\r' && at[1] == '\n';
}

/* Adds a header. 1, 0 if it was there before, -1 with an exception. */
static int
put(PyObject *headers, const char *name, Py_ssize_t name_size, const char *value, Py_ssize_t size)
{
    PyObject *key = PyUnicode_FromStringAndSize(name, name_size), *text = PyUnicode_FromStringAndSize(value, size);
    Py_ssize_t before = PyDict_GET_SIZE(headers);
    int error = key == NULL || text == NULL || PyDict_SetItem(headers, key, text) < 0;
    Py_XDECREF(key);
    Py_XDECREF(text);
    return error ? -1 : PyDict_GET_SIZE(headers) > before;
}

/* The lines from `at` to the empty one. What comes after that; NULL if a line is unusual, or with an exception. */
static const char *
take_headers(const char *at, const char *end, PyObject *headers, struct framing *framing)
{
    char name[MOST_NAME_BYTES];
    while (!ends_line(at, end)) {
        Py_ssize_t name_size = take_name(at, end, name);
        if (name_size < 0)
            return NULL;
        const char *value = at + name_size + 1;
        while (value < end && *value == ' ')
            value++;
        at = printable(value, end);
        if (at == value || at[-1] == ' ' || !ends_line(at, end) ||
            !note(framing, name, name_size, value, at - value) ||
            put(headers, name, name_size, value, at - value) != 1)
            return NULL;
        at += 2;
    }
    return at + 2;
}

static PyObject *
none_or_error(void)
{
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

/* The data of an argument that is bytes, and their end where a head must have ended; NULL with an exception. */
static const char *
bytes_of(PyObject *data, const char **end, const char **head_end)
{
    char *begin;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(data, &begin, &size) < 0)
        return NULL;
    *end = begin + size;
    *head_end = begin + (size < MOST_HEAD_BYTES ? size : MOST_HEAD_BYTES);
    return begin;
}

/* What a request line holds: the method, the target with its query; what comes after it, or NULL. */
static const char *
take_request_line(const char *at, const char *end, Py_ssize_t *method, const char **target, const char **query)
{
    *method = end - at > 5 && memcmp(at, "POST /", 6) == 0 ? 4 : end - at > 4 && memcmp(at, "GET /", 5) == 0 ? 3 : 0;
    if (*method == 0)
        return NULL;
    *target = at = at + *method + 1;
    *query = NULL;
    for (; at < end && *at > 0x20 && *at < 0x7f; at++) {
        if (*at == '#')
            return NULL;
        if (*at == '?' && *query == NULL)
            *query = at;
    }
    if (end - at < 11 || memcmp(at, " HTTP/1.1\r\n", 11) != 0)
        return NULL;
    if (*query == NULL)
        *query = at;
    return at + 11;
}

PyDoc_STRVAR(request_doc,
"request(data) -> (method, path, query, headers, body) | None\n\n"
"What a read holds if it is one whole usual request, no more and no less. Header names are in lower case.");

static PyObject *
heads_request(PyObject *module, PyObject *data)
{
    const char *end, *head_end, *target, *query, *begin = bytes_of(data, &end, &head_end);
    Py_ssize_t method;
    if (begin == NULL)
        return NULL;
    const char *at = take_request_line(begin, head_end, &method, &target, &query);
    if (at == NULL)
        Py_RETURN_NONE;
    const char *target_end = at - 11;
    struct framing framing = {.length = -1};
    PyObject *headers = PyDict_New(), *found = NULL;
    if (headers == NULL)
        return NULL;
    at = take_headers(at, head_end, headers, &framing);
    if (at != NULL && !framing.chunked && end - at == (framing.length < 0 ? 0 : framing.length)) {
        Py_ssize_t asked = query < target_end ? target_end - query - 1 : 0;
        found = Py_BuildValue("s#s#s#Oy#", begin, method, target, query - target, target_end - asked, asked, headers,
                              at, end - at);
    }
    Py_DECREF(headers);
    return found != NULL ? found : none_or_error();
}

PyDoc_STRVAR(response_doc,
"response(data) -> (status, headers, end) | None\n\n"
"What a read begins with if that is a usual head of an answer whose connection may be kept: ``data[end:]`` is its\n"
"whole body, or the beginning of one in chunks (then ``headers`` has a transfer-encoding).");

static PyObject *
heads_response(PyObject *module, PyObject *data)
{
    const char *end, *head_end, *begin = bytes_of(data, &end, &head_end);
    if (begin == NULL)
        return NULL;
    if (head_end - begin < 13 || memcmp(begin, "HTTP/1.1 ", 9) != 0 || begin[12] != ' ')
        Py_RETURN_NONE;
    Py_ssize_t status = number(begin + 9, 3);
    const char *at = printable(begin + 13, head_end);
    if (status < 200 || status > 599 || status == 204 || status == 304 || !ends_line(at, head_end))
        Py_RETURN_NONE;
    struct framing framing = {.length = -1};
    PyObject *headers = PyDict_New(), *found = NULL;
    if (headers == NULL)
        return NULL;
    at = take_headers(at + 2, head_end, headers, &framing);
    if (at != NULL && (framing.chunked ? framing.length < 0 : framing.length == end - at))
        found = Py_BuildValue("nOn", status, headers, at - begin);
    Py_DECREF(headers);
    return found != NULL ? found : none_or_error();
}

static PyMethodDef methods[] = {
    {"request", heads_request, METH_O, request_doc},
    {"response", heads_response, METH_O, response_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvbench.processes.http1._heads",
    .m_doc = "Usual heads of requests and answers, read in one go.",
    .m_size = 0,
    .m_methods = methods,
};

PyMODINIT_FUNC
PyInit__heads(void)
{
    return PyModuleDef_Init(&definition);
}
