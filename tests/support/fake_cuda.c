/* As much of CUDA's driver API as kvbench calls: one GPU, whose memory is memory of its own in this process.
   KVBENCH_FAKE_CUDA_LOG names a file that gets a line for each copy: which way, and how many bytes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long CUdeviceptr;

static void note(const char *way, size_t n) {
    const char *name = getenv("KVBENCH_FAKE_CUDA_LOG");
    FILE *file = name ? fopen(name, "a") : NULL;
    if (file) {
        fprintf(file, "%s %zu\n", way, n);
        fclose(file);
    }
}

int cuInit(unsigned int flags) { return flags ? 1 : 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal ? 101 : 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)8; return device ? 101 : 0; }
int cuCtxSetCurrent(void *context) { return context ? 0 : 201; }
int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { *free_bytes = *total = (size_t)1 << 30; return 0; }
int cuMemAlloc_v2(CUdeviceptr *pointer, size_t n) {
    *pointer = (CUdeviceptr)(size_t)malloc(n);
    return *pointer ? 0 : 2;
}
int cuMemsetD8_v2(CUdeviceptr pointer, unsigned char value, size_t n) {
    memset((void *)(size_t)pointer, value, n);
    return 0;
}
int cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t n) {
    memcpy((void *)(size_t)to, from, n);
    note("HtoD", n);
    return 0;
}
int cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t n) {
    memcpy(to, (void *)(size_t)from, n);
    note("DtoH", n);
    return 0;
}
int cuGetErrorName(int code, const char **name) { *name = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR"; return 0; }
