/* plain_proxy PORT SERVER_PORT: passes bytes between connections of 127.0.0.1, and knows nothing of HTTP.

   What perf_router measures beside the router: whatever a proxy in one process does, it reads and writes each
   chunk as this one does. So this is what the machine itself costs. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#define MOST_DESCRIPTORS 65536
#define EVENTS_AT_ONCE 64
#define STALLED_MS 5000 /* a reader that takes nothing for so long is dropped */

static int other[MOST_DESCRIPTORS]; /* the end that a connection is joined to; 0: none */
static char buffer[65536];
static int epoll;

static void
fail(const char *what)
{
    perror(what);
    exit(1);
}

static struct sockaddr_in
address_of(const char *port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(port))};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

static void
watch(int fd)
{
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) < 0)
        fail("epoll_ctl");
}

static void
drop(int fd)
{
    int peer = other[fd];
    other[fd] = other[peer] = 0;
    close(fd);
    close(peer);
}

static void
join(int listening, const struct sockaddr_in *server)
{
    int yes = 1, client = accept4(listening, NULL, NULL, SOCK_CLOEXEC), made = socket(AF_INET, SOCK_STREAM, 0);
    if (client < 0 || made < 0 || client >= MOST_DESCRIPTORS || made >= MOST_DESCRIPTORS ||
        connect(made, (const struct sockaddr *)server, sizeof *server) < 0) {
        close(client);
        close(made);
        return;
    }
    setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    setsockopt(made, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    other[client] = made;
    other[made] = client;
    watch(client);
    watch(made);
}

/* Writes all that was read. Whether it could. */
static int
pass_on(int to, ssize_t count)
{
    for (ssize_t at = 0; at < count;) {
        ssize_t sent = send(to, buffer + at, count - at, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent >= 0) {
            at += sent;
            continue;
        }
        struct pollfd room = {.fd = to, .events = POLLOUT};
        if (errno != EAGAIN || poll(&room, 1, STALLED_MS) != 1)
            return 0;
    }
    return 1;
}

static void
serve(int fd)
{
    if (other[fd] == 0) /* its other end closed in this round */
        return;
    ssize_t count = recv(fd, buffer, sizeof buffer, MSG_DONTWAIT);
    if (count < 0 && errno == EAGAIN)
        return;
    if (count <= 0 || !pass_on(other[fd], count))
        drop(fd);
}

int
main(int count, char **words)
{
    struct rlimit limit;
    int yes = 1, listening = socket(AF_INET, SOCK_STREAM, 0);
    if (count != 3)
        return 2;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    struct sockaddr_in own = address_of(words[1]), server = address_of(words[2]);
    setsockopt(listening, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (bind(listening, (struct sockaddr *)&own, sizeof own) < 0 || listen(listening, 4096) < 0)
        fail("listen");
    if ((epoll = epoll_create1(0)) < 0)
        fail("epoll");
    watch(listening);
    for (;;) {
        struct epoll_event events[EVENTS_AT_ONCE];
        int ready = epoll_wait(epoll, events, EVENTS_AT_ONCE, -1);
        if (ready < 0 && errno != EINTR)
            fail("epoll_wait");
        for (int index = 0; index < ready; index++) {
            int fd = events[index].data.fd;
            if (fd == listening)
                join(listening, &server);
            else
                serve(fd);
        }
    }
}
