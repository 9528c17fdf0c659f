/* Records what a process changes below one directory: the calls of libc and libaio that write, sync, resize, make,
 * rename and remove. For LD_PRELOAD; recording.py builds it and reads the log.
 *
 * RECORD_ROOT is the directory, without symbolic links; RECORD_LOG the file to append to. Each call makes two records,
 * one before and one after it, so that a reader knows which calls overlapped. Changes of memory mapped from files are
 * not seen, and not what io_uring writes.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/aio_abi.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { END, WRITE, RESIZE, ALLOCATE, SYNC, CREATE, RENAME, UNLINK, MKDIR, RMDIR, LINK, MARK, NAMELESS };

struct record {
    uint32_t kind, id;
    uint64_t inode;   /* of the file; of END after CREATE and MKDIR, of the new one */
    int64_t offset;   /* of END: what the call returned */
    int64_t length;   /* of ALLOCATE: up to where */
    uint32_t path, other, data, flags; /* lengths of what follows; flags: the mode of ALLOCATE, 1 of a durable WRITE */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int log_fd = -1;
static uint32_t last_id;
static const char *root;

#define NEXT(type, name) ((type)dlsym(RTLD_NEXT, name))

static void append(struct record *record, const char *path, const char *other, const struct iovec *parts, int count)
{
    struct iovec all[1024 + 3];
    int n = 0;
    record->path = path ? strlen(path) : 0;
    record->other = other ? strlen(other) : 0;
    record->data = 0;
    all[n++] = (struct iovec){record, sizeof *record};
    if (path)
        all[n++] = (struct iovec){(void *)path, record->path};
    if (other)
        all[n++] = (struct iovec){(void *)other, record->other};
    for (int i = 0; i < count; i++) {
        record->data += parts[i].iov_len;
        all[n++] = parts[i];
    }
    int saved = errno;
    pthread_mutex_lock(&lock);
    if (log_fd < 0) {
        const char *name = getenv("RECORD_LOG");
        log_fd = name ? syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    }
    if (record->kind != END)
        record->id = ++last_id;
    size_t size = 0;
    for (int i = 0; i < n; i++)
        size += all[i].iov_len;
    if (log_fd >= 0 && syscall(SYS_writev, log_fd, all, n) != (long)size)
        abort();
    pthread_mutex_unlock(&lock);
    errno = saved;
}

static void end(uint32_t id, int64_t result, uint64_t inode)
{
    struct record record = {.kind = END, .id = id, .offset = result, .inode = inode};
    append(&record, NULL, NULL, NULL, 0);
}

static int below(const char *path)
{
    if (!root && !(root = getenv("RECORD_ROOT")))
        root = "";
    size_t length = strlen(root);
    return length && !strncmp(path, root, length) && (path[length] == '/' || !path[length]);
}

/* The absolute path of a name, its directory's symbolic links resolved; NULL when it is elsewhere. */
static char *absolute(int at, const char *name, char *out)
{
    char joined[PATH_MAX], directory[PATH_MAX];
    if (name[0] == '/' || at == AT_FDCWD) {
        if (name[0] == '/')
            snprintf(joined, sizeof joined, "%s", name);
        else if (!getcwd(directory, sizeof directory) ||
                 snprintf(joined, sizeof joined, "%s/%s", directory, name) >= PATH_MAX)
            return NULL;
    } else {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", at);
        ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, directory, sizeof directory - 1);
        if (length < 0)
            return NULL;
        directory[length] = 0;
        if (snprintf(joined, sizeof joined, "%s/%s", directory, name) >= PATH_MAX)
            return NULL;
    }
    char *slash = strrchr(joined, '/');
    *slash = 0;
    char *real = realpath(slash == joined ? "/" : joined, directory);
    if (!real || snprintf(out, PATH_MAX, "%s/%s", directory, slash + 1) >= PATH_MAX || !below(out))
        return NULL;
    return out;
}

/* The inode of an open file below the root; 0 for any other. */
static uint64_t inode_of(int fd, char *path)
{
    char link[64];
    struct stat status;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int saved = errno;
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
    uint64_t inode = length > 0 && below(path) && !fstat(fd, &status) ? status.st_ino : 0;
    errno = saved;
    return inode;
}

static uint64_t inode_at(const char *path)
{
    struct stat status;
    int saved = errno;
    uint64_t inode = fstatat(AT_FDCWD, path, &status, AT_SYMLINK_NOFOLLOW) ? 0 : status.st_ino;
    errno = saved;
    return inode;
}

void record_mark(const char *words)
{
    struct record record = {.kind = MARK};
    append(&record, words, NULL, NULL, 0);
}

/* Data */

static uint32_t begin_write(int fd, const struct iovec *parts, int count, int64_t offset)
{
    char path[PATH_MAX];
    uint64_t inode = inode_of(fd, path);
    if (!inode)
        return 0;
    int flags = syscall(SYS_fcntl, fd, F_GETFL);
    if (offset < 0)
        offset = flags & O_APPEND ? lseek(fd, 0, SEEK_END) : lseek(fd, 0, SEEK_CUR);
    struct record record = {.kind = WRITE, .inode = inode, .offset = offset, .flags = !!(flags & O_DSYNC)};
    append(&record, NULL, NULL, parts, count);
    return record.id;
}

ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off64_t offset, int flags)
{
    uint32_t id = begin_write(fd, parts, count, offset);
    ssize_t done = NEXT(ssize_t(*)(int, const struct iovec *, int, off64_t, int), "pwritev64v2")(fd, parts, count,
                                                                                                offset, flags);
    if (id)
        end(id, done, 0);
    return done;
}

ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t offset, int flags)
{
    return pwritev64v2(fd, parts, count, offset, flags);
}

ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t offset)
{
    return pwritev64v2(fd, parts, count, offset, 0);
}

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset)
{
    return pwritev64v2(fd, parts, count, offset, 0);
}

ssize_t pwrite64(int fd, const void *data, size_t length, off64_t offset)
{
    struct iovec part = {(void *)data, length};
    uint32_t id = begin_write(fd, &part, 1, offset);
    ssize_t done = NEXT(ssize_t(*)(int, const void *, size_t, off64_t), "pwrite64")(fd, data, length, offset);
    if (id)
        end(id, done, 0);
    return done;
}

ssize_t pwrite(int fd, const void *data, size_t length, off_t offset)
{
    return pwrite64(fd, data, length, offset);
}

ssize_t write(int fd, const void *data, size_t length)
{
    struct iovec part = {(void *)data, length};
    uint32_t id = begin_write(fd, &part, 1, -1);
    ssize_t done = NEXT(ssize_t(*)(int, const void *, size_t), "write")(fd, data, length);
    if (id)
        end(id, done, 0);
    return done;
}

ssize_t writev(int fd, const struct iovec *parts, int count)
{
    uint32_t id = begin_write(fd, parts, count, -1);
    ssize_t done = NEXT(ssize_t(*)(int, const struct iovec *, int), "writev")(fd, parts, count);
    if (id)
        end(id, done, 0);
    return done;
}

/* What is under way by io_submit. A call that is not asked about is never finished: it may be lost for ever. */
static struct {
    struct iocb *call;
    uint32_t id;
} flying[4096];

long io_submit(aio_context_t context, long count, struct iocb *calls[])
{
    for (long i = 0; i < count; i++) {
        struct iocb *call = calls[i];
        struct iovec part = {(void *)(uintptr_t)call->aio_buf, call->aio_nbytes};
        uint32_t id = 0;
        if (call->aio_lio_opcode == IOCB_CMD_PWRITE)
            id = begin_write(call->aio_fildes, &part, 1, call->aio_offset);
        else if (call->aio_lio_opcode == IOCB_CMD_PWRITEV)
            id = begin_write(call->aio_fildes, (struct iovec *)(uintptr_t)call->aio_buf, call->aio_nbytes, call->aio_offset);
        for (int slot = 0; id && slot < 4096; slot++)
            if (!flying[slot].call) {
                flying[slot].id = id;
                flying[slot].call = call;
                break;
            }
    }
    long done = syscall(SYS_io_submit, context, count, calls);
    return done < 0 ? -errno : done; /* of those not taken, which are submitted again, the first record never ends */
}

int io_getevents(aio_context_t context, long least, long most, struct io_event *events, struct timespec *timeout)
{
    long came = syscall(SYS_io_getevents, context, least, most, events, timeout);
    for (long i = 0; i < came; i++)
        for (int slot = 0; slot < 4096; slot++)
            if (flying[slot].call == (struct iocb *)(uintptr_t)events[i].obj) {
                uint32_t id = flying[slot].id;
                flying[slot].call = NULL;
                end(id, events[i].res, 0);
            }
    return came < 0 ? -errno : came;
}

/* Sizes and syncing */

#define ON_FILE(kind_, offset_, length_, flags_, call)                                                                 \
    char path[PATH_MAX];                                                                                               \
    struct record record = {                                                                                           \
        .kind = kind_, .inode = inode_of(fd, path), .offset = offset_, .length = length_, .flags = flags_};            \
    if (record.inode)                                                                                                  \
        append(&record, path, NULL, NULL, 0);                                                                          \
    int result = call;                                                                                                 \
    if (record.inode)                                                                                                  \
        end(record.id, result, 0);                                                                                     \
    return result;

int ftruncate64(int fd, off64_t length)
{
    ON_FILE(RESIZE, length, 0, 0, NEXT(int (*)(int, off64_t), "ftruncate64")(fd, length))
}

int ftruncate(int fd, off_t length)
{
    return ftruncate64(fd, length);
}

int fallocate64(int fd, int mode, off64_t offset, off64_t length)
{
    ON_FILE(ALLOCATE, offset, length, mode,
            NEXT(int (*)(int, int, off64_t, off64_t), "fallocate64")(fd, mode, offset, length))
}

int fallocate(int fd, int mode, off_t offset, off_t length)
{
    return fallocate64(fd, mode, offset, length);
}

int posix_fallocate64(int fd, off64_t offset, off64_t length)
{
    ON_FILE(ALLOCATE, offset, length, 0, NEXT(int (*)(int, off64_t, off64_t), "posix_fallocate64")(fd, offset, length))
}

int posix_fallocate(int fd, off_t offset, off_t length)
{
    return posix_fallocate64(fd, offset, length);
}

int fsync(int fd)
{
    ON_FILE(SYNC, 0, 0, 0, NEXT(int (*)(int), "fsync")(fd))
}

int fdatasync(int fd)
{
    ON_FILE(SYNC, 0, 0, 0, NEXT(int (*)(int), "fdatasync")(fd))
}

int truncate64(const char *name, off64_t length)
{
    char path[PATH_MAX];
    struct record record = {.kind = RESIZE, .offset = length};
    int is_ours = absolute(AT_FDCWD, name, path) && (record.inode = inode_at(path));
    if (is_ours)
        append(&record, path, NULL, NULL, 0);
    int result = NEXT(int (*)(const char *, off64_t), "truncate64")(name, length);
    if (is_ours)
        end(record.id, result, 0);
    return result;
}

int truncate(const char *name, off_t length)
{
    return truncate64(name, length);
}

/* Names */

/* One call on names at a time, so that the log has them in the order in which they were done. */
static pthread_mutex_t one_by_one = PTHREAD_MUTEX_INITIALIZER;

static int opened(const char *symbol, int at, const char *name, int flags, mode_t mode)
{
    char path[PATH_MAX];
    struct record record = {.kind = CREATE};
    uint64_t before = 0;
    int is_ours = flags & (O_CREAT | O_TRUNC) && (flags & O_TMPFILE) != O_TMPFILE && absolute(at, name, path);
    int is_locked = is_ours;
    if (is_ours) {
        pthread_mutex_lock(&one_by_one);
        before = inode_at(path);
        if (before)
            record = (struct record){.kind = RESIZE, .inode = before};
        is_ours = !before || flags & O_TRUNC;
    }
    if (is_ours)
        append(&record, path, NULL, NULL, 0);
    int fd = symbol ? NEXT(int (*)(const char *, int, ...), symbol)(name, flags, mode)
                    : NEXT(int (*)(int, const char *, int, ...), "openat64")(at, name, flags, mode);
    if (is_ours)
        end(record.id, fd, before || fd < 0 ? 0 : inode_of(fd, path));
    if (fd >= 0 && (flags & O_TMPFILE) == O_TMPFILE) {
        struct record nameless = {.kind = NAMELESS, .inode = inode_of(fd, path)};
        append(&nameless, NULL, NULL, NULL, 0);
    }
    if (is_locked)
        pthread_mutex_unlock(&one_by_one);
    return fd;
}

#define MODE(flags)                                                                                                    \
    va_list rest;                                                                                                      \
    va_start(rest, flags);                                                                                             \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                                            \
    va_end(rest);

int open64(const char *name, int flags, ...)
{
    MODE(flags)
    return opened("open64", AT_FDCWD, name, flags, mode);
}

int open(const char *name, int flags, ...)
{
    MODE(flags)
    return opened("open64", AT_FDCWD, name, flags, mode);
}

int openat64(int at, const char *name, int flags, ...)
{
    MODE(flags)
    return opened(NULL, at, name, flags, mode);
}

int openat(int at, const char *name, int flags, ...)
{
    MODE(flags)
    return opened(NULL, at, name, flags, mode);
}

static int on_names(uint32_t kind, int at, const char *name, int other_at, const char *other, int (*call)(void *),
                    void *arguments)
{
    char path[PATH_MAX], target[PATH_MAX];
    struct record record = {.kind = kind};
    int is_ours = !!absolute(at, name, path);
    if (other)
        is_ours |= !!absolute(other_at, other, target);
    if (is_ours) {
        pthread_mutex_lock(&one_by_one);
        append(&record, path, other ? target : NULL, NULL, 0);
    }
    int result = call(arguments);
    if (is_ours) {
        end(record.id, result, kind == MKDIR && !result ? inode_at(path) : 0);
        pthread_mutex_unlock(&one_by_one);
    }
    return result;
}

struct names {
    int at, other_at, flags;
    const char *name, *other;
};

static int do_rename(void *given)
{
    struct names *names = given;
    return syscall(SYS_renameat2, names->at, names->name, names->other_at, names->other, names->flags);
}

static int do_unlink(void *given)
{
    struct names *names = given;
    return syscall(SYS_unlinkat, names->at, names->name, names->flags);
}

static int do_mkdir(void *given)
{
    struct names *names = given;
    return syscall(SYS_mkdirat, names->at, names->name, names->flags);
}

static int do_link(void *given)
{
    struct names *names = given;
    return syscall(SYS_linkat, names->at, names->name, names->other_at, names->other, names->flags);
}

int renameat2(int at, const char *name, int other_at, const char *other, unsigned flags)
{
    struct names names = {at, other_at, flags, name, other};
    return on_names(RENAME, at, name, other_at, other, do_rename, &names);
}

int renameat(int at, const char *name, int other_at, const char *other)
{
    return renameat2(at, name, other_at, other, 0);
}

int rename(const char *name, const char *other)
{
    return renameat2(AT_FDCWD, name, AT_FDCWD, other, 0);
}

int unlinkat(int at, const char *name, int flags)
{
    struct names names = {at, 0, flags, name, NULL};
    return on_names(flags & AT_REMOVEDIR ? RMDIR : UNLINK, at, name, 0, NULL, do_unlink, &names);
}

int unlink(const char *name)
{
    return unlinkat(AT_FDCWD, name, 0);
}

int rmdir(const char *name)
{
    return unlinkat(AT_FDCWD, name, AT_REMOVEDIR);
}

int mkdirat(int at, const char *name, mode_t mode)
{
    struct names names = {at, 0, mode, name, NULL};
    return on_names(MKDIR, at, name, 0, NULL, do_mkdir, &names);
}

int mkdir(const char *name, mode_t mode)
{
    return mkdirat(AT_FDCWD, name, mode);
}

int linkat(int at, const char *name, int other_at, const char *other, int flags)
{
    struct names names = {at, other_at, flags, name, other};
    return on_names(LINK, at, name, other_at, other, do_link, &names);
}

int link(const char *name, const char *other)
{
    return linkat(AT_FDCWD, name, AT_FDCWD, other, 0);
}
