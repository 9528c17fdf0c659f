/* libcuda.so.1 for machines without a GPU: what kvikio calls of the driver, and what a test needs to have device memory.
 *
 * cuMemAlloc gives out addresses that the processor cannot touch (PROT_NONE); the bytes lie behind a second mapping that
 * only the copies of this file, and the emulated cuFile, look at. So whatever takes device memory for host memory
 * crashes, or is told EFAULT by the kernel. Streams do at once what they are given; like the real driver, copies and
 * streams want a current context. One device, number 0. A test changes the numbers of `emulated_cuda` to inject faults.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

typedef uintptr_t Address;
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, NOT_FOUND = 500, LAUNCH_FAILED = 719 };
enum { CONTEXT = 1, MEMORY_TYPE = 2, DEVICE_POINTER = 3, DEVICE_ORDINAL = 9 }; /* pointer attributes */

/* Places in the numbers that a test may write; build.py has the same list. */
enum {
    COPIES,       /* counter, kept here */
    SYNCS,        /* likewise: of the default stream */
    FAIL_COPY_NTH, /* counts from 1, 0 is never */
    FAIL_PIN,     /* no page-locked memory is to be had */
    SYNC_US,      /* how long the default stream has still work to do */
    PLACES
};
__attribute__((visibility("default"))) int64_t emulated_cuda[PLACES];

static int64_t get(int place) { return __atomic_load_n(&emulated_cuda[place], __ATOMIC_SEQ_CST); }
static int64_t add(int place, int64_t by) { return __atomic_add_fetch(&emulated_cuda[place], by, __ATOMIC_SEQ_CST); }

/* Memory */

typedef struct Allocation {
    Address base;
    size_t size;
    char *bytes; /* where they really are */
    struct Allocation *next;
} Allocation;

static Allocation *allocations;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int find(Address address, Allocation *found) {
    pthread_mutex_lock(&lock);
    Allocation *at = allocations;
    while (at && !(at->base <= address && address < at->base + at->size))
        at = at->next;
    if (at)
        *found = *at;
    pthread_mutex_unlock(&lock);
    return at != NULL;
}

/* Where the bytes at an address are; NULL where an access would leave its allocation. */
__attribute__((visibility("default"))) void *emulated_bytes(const void *address, size_t size) {
    Allocation a;
    if (!find((Address)address, &a))
        return (void *)address;
    return size <= a.size - ((Address)address - a.base) ? a.bytes + ((Address)address - a.base) : NULL;
}

int cuMemAlloc_v2(Address *address, size_t size) {
    int fd = memfd_create("emulated-device-memory", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)size))
        return OUT_OF_MEMORY;
    char *bytes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    void *base = mmap(NULL, size, PROT_NONE, MAP_SHARED, fd, 0);
    close(fd);
    if (bytes == MAP_FAILED || base == MAP_FAILED)
        return OUT_OF_MEMORY;
    Allocation *a = malloc(sizeof *a);
    pthread_mutex_lock(&lock);
    *a = (Allocation){(Address)base, size, bytes, allocations};
    allocations = a;
    pthread_mutex_unlock(&lock);
    *address = (Address)base;
    return SUCCESS;
}

int cuMemFree_v2(Address address) {
    Allocation gone = {0};
    pthread_mutex_lock(&lock);
    for (Allocation **at = &allocations; *at; at = &(*at)->next)
        if ((*at)->base == address) {
            Allocation *a = *at;
            gone = *a;
            *at = a->next;
            free(a);
            break;
        }
    pthread_mutex_unlock(&lock);
    if (!gone.base)
        return INVALID_VALUE;
    munmap(gone.bytes, gone.size);
    munmap((void *)gone.base, gone.size);
    return SUCCESS;
}

int cuMemGetAddressRange_v2(Address *base, size_t *size, Address address) {
    Allocation a;
    if (!find(address, &a))
        return NOT_FOUND;
    *base = a.base;
    *size = a.size;
    return SUCCESS;
}

static int fill(void *data, int attribute, Address address, int on_device) {
    switch (attribute) {
    case CONTEXT: *(void **)data = on_device ? emulated_cuda : NULL; return SUCCESS;
    case MEMORY_TYPE: *(unsigned *)data = on_device ? 2 : 0; return SUCCESS;
    case DEVICE_POINTER: *(Address *)data = address; return SUCCESS;
    case DEVICE_ORDINAL: *(int *)data = 0; return SUCCESS;
    default: return INVALID_VALUE;
    }
}

int cuPointerGetAttribute(void *data, int attribute, Address address) {
    Allocation a;
    return find(address, &a) ? fill(data, attribute, address, 1) : INVALID_VALUE;
}

int cuPointerGetAttributes(unsigned count, int *attributes, void **data, Address address) {
    Allocation a;
    int on_device = find(address, &a), result = SUCCESS;
    for (unsigned i = 0; i < count && !result; i++)
        result = fill(data[i], attributes[i], address, on_device);
    return result;
}

int cuMemHostAlloc(void **memory, size_t size, unsigned flags) {
    (void)flags;
    return get(FAIL_PIN) || !(*memory = malloc(size)) ? OUT_OF_MEMORY : SUCCESS;
}
int cuMemFreeHost(void *memory) { free(memory); return SUCCESS; }
int cuMemHostRegister_v2(void *memory, size_t size, unsigned flags) {
    (void)memory, (void)size, (void)flags;
    return get(FAIL_PIN) ? OUT_OF_MEMORY : SUCCESS;
}
int cuMemHostUnregister(void *memory) { (void)memory; return SUCCESS; }

/* Contexts: there is one, and a thread has it or not. */

static _Thread_local int depth;

int cuInit(unsigned flags) { (void)flags; return SUCCESS; }
int cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
int cuDeviceGet(int *device, int ordinal) { *device = 0; return ordinal ? 101 : SUCCESS; }
int cuDeviceGetCount(int *count) { *count = 1; return SUCCESS; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { (void)attribute, (void)device; *value = 0; return SUCCESS; }
int cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; *context = emulated_cuda; return SUCCESS; }
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return SUCCESS; }
int cuCtxCreate_v4(void **context, void *params, unsigned flags, int device) {
    (void)params, (void)flags, (void)device;
    *context = emulated_cuda;
    return SUCCESS;
}
int cuCtxDestroy_v2(void *context) { (void)context; return SUCCESS; }
int cuCtxPushCurrent_v2(void *context) { return context == emulated_cuda ? depth++, SUCCESS : INVALID_CONTEXT; }
int cuCtxPopCurrent_v2(void **context) {
    *context = emulated_cuda;
    return depth ? depth--, SUCCESS : INVALID_CONTEXT;
}
int cuCtxGetCurrent(void **context) { *context = depth ? emulated_cuda : NULL; return SUCCESS; }
int cuCtxGetDevice(int *device) { *device = 0; return depth ? SUCCESS : INVALID_CONTEXT; }

/* Copies, streams and events */

static int copy(Address to, Address from, size_t size) {
    void *target = emulated_bytes((void *)to, size), *source = emulated_bytes((void *)from, size);
    if (!target || !source)
        return INVALID_VALUE;
    if (add(COPIES, 1) == get(FAIL_COPY_NTH))
        return LAUNCH_FAILED;
    memcpy(target, source, size);
    return SUCCESS;
}

int cuMemcpyAsync(Address to, Address from, size_t size, void *stream) {
    (void)stream;
    return depth ? copy(to, from, size) : INVALID_CONTEXT;
}
int cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t size, void *stream) {
    return cuMemcpyAsync(to, (Address)from, size, stream);
}
int cuMemcpyDtoHAsync_v2(void *to, Address from, size_t size, void *stream) {
    return cuMemcpyAsync((Address)to, from, size, stream);
}
int cuMemcpyBatchAsync_v2(Address *to, Address *from, size_t *sizes, size_t count, void *attributes, size_t *indices,
                          size_t attribute_count, void *stream) {
    (void)attributes, (void)indices, (void)attribute_count;
    int result = stream ? SUCCESS : INVALID_VALUE;
    for (size_t i = 0; i < count && !result; i++)
        result = cuMemcpyAsync(to[i], from[i], sizes[i], stream);
    return result;
}

/* For tests: they have no context, and their copies are not counted. */
int cuMemcpyHtoD_v2(Address to, const void *from, size_t size) {
    void *target = emulated_bytes((void *)to, size);
    return target ? memcpy(target, from, size), SUCCESS : INVALID_VALUE;
}
int cuMemcpyDtoH_v2(void *to, Address from, size_t size) {
    void *source = emulated_bytes((void *)from, size);
    return source ? memcpy(to, source, size), SUCCESS : INVALID_VALUE;
}

int cuStreamCreate(void **stream, unsigned flags) { (void)flags; return (*stream = malloc(1)) ? SUCCESS : OUT_OF_MEMORY; }
int cuStreamDestroy_v2(void *stream) { free(stream); return SUCCESS; }
int cuStreamSynchronize(void *stream) {
    if (!stream) {
        add(SYNCS, 1);
        usleep((useconds_t)get(SYNC_US));
    }
    return depth ? SUCCESS : INVALID_CONTEXT;
}
int cuEventCreate(void **event, unsigned flags) { return cuStreamCreate(event, flags); }
int cuEventDestroy_v2(void *event) { return cuStreamDestroy_v2(event); }
int cuEventRecord(void *event, void *stream) { (void)event, (void)stream; return SUCCESS; }
int cuEventSynchronize(void *event) { (void)event; return SUCCESS; }
int cuEventQuery(void *event) { (void)event; return SUCCESS; }
int cuLaunchHostFunc(void *stream, void (*function)(void *), void *argument) {
    (void)stream;
    function(argument);
    return SUCCESS;
}

int cuGetErrorName(int error, const char **name) { (void)error; *name = "EMULATED_CUDA_ERROR"; return SUCCESS; }
int cuGetErrorString(int error, const char **words) {
    *words = error == OUT_OF_MEMORY ? "out of memory" : "emulated CUDA error";
    return SUCCESS;
}
