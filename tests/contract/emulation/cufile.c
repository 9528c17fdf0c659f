/* libcufile.so.0 for machines without a GPU: "device" memory is host memory, and I/O is pread and pwrite.
 *
 * It exports what NIXL's GDS_MT plugin and kvikio call and nothing more; the declarations follow NVIDIA's public
 * cuFile API. Where the emulated driver (cuda.c) is loaded too, its device memory is reached through it.
 * Faults are injected through a file of 64-bit numbers that the test maps as well; its path is in CUFILE_EMULATION_CONTROL.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

/* Places in the control file; emulation.py has the same list. "nth" counts from 1, 0 is never. */
enum {
    READS,            /* counters, kept here */
    WRITES,
    BUFFERS,          /* registered now */
    FILES,            /* registered now */
    FAIL_READ_NTH,
    FAIL_WRITE_NTH,
    SHORT_READ_NTH,
    SHORT_WRITE_NTH,
    SHORT_BYTES,      /* missing at the end of a short one */
    DELAY_US,         /* before each I/O */
    FAIL_REGISTER,    /* cuFileBufRegister refuses: a warning in the plugins, not an error */
    MAX_REGISTER,     /* bytes that it takes at once; 0: any number */
    LARGEST,          /* bytes that were registered at once, at most */
    BOUNCED,          /* reads and writes of memory that is not registered as one piece */
    FAIL_FILE,        /* cuFileHandleRegister refuses */
    PLACES
};

static int64_t fallback[PLACES];
static int64_t *control = fallback;

__attribute__((constructor)) static void map_control(void) {
    const char *path = getenv("CUFILE_EMULATION_CONTROL");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *mapped = mmap(NULL, sizeof fallback, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped != MAP_FAILED)
        control = mapped;
    close(fd);
}

static int64_t get(int place) { return __atomic_load_n(&control[place], __ATOMIC_SEQ_CST); }
static int64_t add(int place, int64_t by) { return __atomic_add_fetch(&control[place], by, __ATOMIC_SEQ_CST); }

typedef struct { int err; int cuda_err; } Error;
typedef struct { int type; union { int fd; void *handle; } handle; const void *fs_ops; } Descr;
typedef struct { int fd; } File;
enum { ERROR_DRIVER = 5001, ERROR_MEMORY = 5013, ERROR_REGISTERED = 5023, ERROR_UNREGISTERED = 5024, ERROR_INTERNAL = 5030 };

static Error error_of(int err) { Error error = {err, 0}; return error; }

/* Where the bytes at an address are. Without an emulated driver every address is what it says. */
static void *(*translate)(const void *, size_t);

static void find_driver(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_NOW);
    *(void **)&translate = driver ? dlsym(driver, "emulated_bytes") : NULL;
}

static char *bytes_at(char *memory, size_t size) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, find_driver);
    return translate ? translate(memory, size) : memory;
}

typedef struct Buffer { const char *base; size_t length; struct Buffer *next; } Buffer;
static Buffer *buffers;
static pthread_mutex_t buffers_lock = PTHREAD_MUTEX_INITIALIZER;

static void note_bouncing(const char *memory, size_t size) {
    pthread_mutex_lock(&buffers_lock);
    const Buffer *at = buffers;
    while (at && !(memory >= at->base && memory + size <= at->base + at->length))
        at = at->next;
    pthread_mutex_unlock(&buffers_lock);
    if (!at)
        add(BOUNCED, 1);
}

static ssize_t move(int fd, char *memory, size_t size, off_t offset, int write) {
    note_bouncing(memory, size);
    if (!(memory = bytes_at(memory, size))) {
        errno = EFAULT;
        return -1;
    }
    if (get(DELAY_US))
        usleep((useconds_t)get(DELAY_US));
    int64_t nth = add(write ? WRITES : READS, 1);
    if (nth == get(write ? FAIL_WRITE_NTH : FAIL_READ_NTH)) {
        errno = EIO;
        return -1;
    }
    if (nth == get(write ? SHORT_WRITE_NTH : SHORT_READ_NTH))
        size -= (size_t)get(SHORT_BYTES) < size ? (size_t)get(SHORT_BYTES) : size;
    size_t done = 0;
    while (done < size) {
        ssize_t moved = write ? pwrite(fd, memory + done, size - done, offset + (off_t)done)
                              : pread(fd, memory + done, size - done, offset + (off_t)done);
        if (moved < 0)
            return done ? (ssize_t)done : -1;
        if (moved == 0)
            break;
        done += (size_t)moved;
    }
    return (ssize_t)done;
}

Error cuFileDriverOpen(void) { return error_of(0); }
Error cuFileDriverClose(void) { return error_of(0); }
Error cuFileDriverClose_v2(void) { return error_of(0); }
Error cuFileDriverGetProperties(void *properties) { (void)properties; return error_of(ERROR_DRIVER); }
Error cuFileDriverSetPollMode(int poll, size_t threshold) { (void)poll, (void)threshold; return error_of(0); }
Error cuFileDriverSetMaxCacheSize(size_t size) { (void)size; return error_of(0); }
Error cuFileDriverSetMaxPinnedMemSize(size_t size) { (void)size; return error_of(0); }

Error cuFileHandleRegister(void **handle, Descr *descr) {
    File *file = malloc(sizeof *file);
    if (!file || fcntl(descr->handle.fd, F_GETFD) < 0 || get(FAIL_FILE)) {
        free(file);
        return error_of(ERROR_INTERNAL);
    }
    file->fd = descr->handle.fd;
    *handle = file;
    add(FILES, 1);
    return error_of(0);
}

void cuFileHandleDeregister(void *handle) {
    add(FILES, -1);
    free(handle);
}


static Buffer **find_buffer(const void *base) {
    Buffer **at = &buffers;
    while (*at && (*at)->base != base)
        at = &(*at)->next;
    return at;
}

Error cuFileBufRegister(const void *base, size_t length, int flags) {
    (void)flags;
    if (get(FAIL_REGISTER) || (get(MAX_REGISTER) && (int64_t)length > get(MAX_REGISTER)))
        return error_of(ERROR_MEMORY);
    if ((int64_t)length > get(LARGEST))
        add(LARGEST, (int64_t)length - get(LARGEST));
    pthread_mutex_lock(&buffers_lock);
    int known = *find_buffer(base) != NULL;
    if (!known) {
        Buffer *buffer = malloc(sizeof *buffer);
        *buffer = (Buffer){base, length, buffers};
        buffers = buffer;
        add(BUFFERS, 1);
    }
    pthread_mutex_unlock(&buffers_lock);
    return error_of(known ? ERROR_REGISTERED : 0);
}

Error cuFileBufDeregister(const void *base) {
    pthread_mutex_lock(&buffers_lock);
    Buffer **at = find_buffer(base), *buffer = *at;
    if (buffer) {
        *at = buffer->next;
        free(buffer);
        add(BUFFERS, -1);
    }
    pthread_mutex_unlock(&buffers_lock);
    return error_of(buffer ? 0 : ERROR_UNREGISTERED);
}

ssize_t cuFileRead(void *handle, void *base, size_t size, off_t file_offset, off_t base_offset) {
    return move(((File *)handle)->fd, (char *)base + base_offset, size, file_offset, 0);
}

ssize_t cuFileWrite(void *handle, const void *base, size_t size, off_t file_offset, off_t base_offset) {
    return move(((File *)handle)->fd, (char *)base + base_offset, size, file_offset, 1);
}

/* Streams and batches: kvikio wants them to be there, and nobody calls them. */
Error cuFileReadAsync(void) { return error_of(ERROR_INTERNAL); }
Error cuFileWriteAsync(void) { return error_of(ERROR_INTERNAL); }
Error cuFileStreamRegister(void) { return error_of(ERROR_INTERNAL); }
Error cuFileStreamDeregister(void) { return error_of(ERROR_INTERNAL); }
Error cuFileBatchIOSetUp(void) { return error_of(ERROR_INTERNAL); }
Error cuFileBatchIOSubmit(void) { return error_of(ERROR_INTERNAL); }
Error cuFileBatchIOGetStatus(void) { return error_of(ERROR_INTERNAL); }
Error cuFileBatchIOCancel(void) { return error_of(ERROR_INTERNAL); }
void cuFileBatchIODestroy(void) {}
