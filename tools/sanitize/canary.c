/* One deliberate fault for each sanitizer: what it must see before its silence counts. */

#include <limits.h>
#include <pthread.h>
#include <stdlib.h>

int
address(int size)
{
    volatile char *bytes = malloc(size);
    int past = bytes[size];
    free((void *)bytes);
    return past;
}

int
undefined(int number)
{
    return INT_MAX - 2 + number;
}

static int shared;

static void *
count(void *unused)
{
    for (int turn = 0; turn < 10000; turn++)
        shared++;
    return unused;
}

int
thread(int threads)
{
    pthread_t started[8];
    for (int each = 0; each < threads; each++)
        pthread_create(&started[each], NULL, count, NULL);
    for (int each = 0; each < threads; each++)
        pthread_join(started[each], NULL);
    return shared;
}
