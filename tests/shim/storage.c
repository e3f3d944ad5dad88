/* A disk that fails on demand: file calls below one directory, with faults that a test sets live.
 *
 * Preloaded into a process (LD_PRELOAD), this library stands before the C library's file calls. Those
 * on files below KVTIER_SHIM_DIRECTORY look at a row of the control file, which the test maps too,
 * and do what it says; all other calls pass. tests/shim/storage.py is the other end.
 *
 * A row is 64 bytes: action, argument, every, waiting (u32 each), calls, faults (u64 each), unused.
 * The fault strikes each `every`-th call. Calls on descriptors are placed by /proc/self/fd, which
 * costs a microsecond and needs no bookkeeping; a removed file keeps its old path there.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum call { OPEN_READ, OPEN_WRITE, READ, WRITE, ALLOCATE, SYNC, TRUNCATE, UNLINK, STATVFS, CALLS };
enum action { NONE, DELAY, BLOCK, FAIL, SHORTEN, FLIP, TEAR, LIE, FILL };

struct row {
    _Atomic uint32_t action, argument, every, waiting;
    _Atomic uint64_t calls, faults;
    char unused[32];
};
_Static_assert(sizeof(struct row) == 64, "the test counts on it");

#define PAGE 4096
#define PIECES_MAX 1024
#define LOOK_NS 2000000 /* how often a blocked call looks whether it was released */

static struct row *rows;
static const char *root;
static size_t root_length;

__attribute__((constructor)) static void attach(void) {
    const char *path = getenv("KVTIER_SHIM_CONTROL");
    root = getenv("KVTIER_SHIM_DIRECTORY");
    if (path == NULL || root == NULL)
        return;
    int (*open_)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
    int fd = open_(path, O_RDWR | O_CLOEXEC);
    void *mapped = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd < 0 || mapped == MAP_FAILED) {
        fprintf(stderr, "storage shim: cannot map %s\n", path);
        _exit(99); /* a test must not run without its faults and pass */
    }
    close(fd);
    root_length = strlen(root);
    rows = mapped;
}

static int is_path_inside(const char *path) {
    return rows != NULL && path != NULL && strncmp(path, root, root_length) == 0 &&
           (path[root_length] == '/' || path[root_length] == '\0');
}

static int is_inside(int fd) {
    char link[64], path[4096];
    if (rows == NULL)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = '\0';
    return is_path_inside(path);
}

static int is_inside_at(int directory, const char *path) {
    return path[0] == '/' || directory == AT_FDCWD ? is_path_inside(path) : is_inside(directory);
}

static void pause_ns(long ns) {
    struct timespec span = {ns / 1000000000, ns % 1000000000};
    nanosleep(&span, NULL);
}

/* Count a call and return the action that it has to undergo itself; waits are undergone here. */
static enum action undergo(enum call call, uint32_t *argument) {
    struct row *row = &rows[call];
    uint64_t number = atomic_fetch_add(&row->calls, 1) + 1;
    enum action action = atomic_load(&row->action);
    uint32_t every = atomic_load(&row->every);
    if (action == NONE || (every > 1 && number % every != 0))
        return NONE;
    *argument = atomic_load(&row->argument);
    atomic_fetch_add(&row->faults, 1);
    if (action != DELAY && action != BLOCK)
        return action;
    atomic_fetch_add(&row->waiting, 1);
    if (action == DELAY)
        pause_ns((long)*argument * 1000000);
    else
        while (atomic_load(&row->action) == BLOCK)
            pause_ns(LOOK_NS);
    atomic_fetch_sub(&row->waiting, 1);
    return NONE;
}

/* Tell whether a call that moves no bytes ends here, with *result. */
static int ends(enum call call, int *result) {
    uint32_t argument = 0;
    enum action action = undergo(call, &argument);
    *result = action == FAIL ? -1 : 0;
    if (action == FAIL)
        errno = (int)argument;
    return action == FAIL || action == LIE;
}

static size_t length_of(const struct iovec *pieces, int count) {
    size_t length = 0;
    for (int i = 0; i < count; i++)
        length += pieces[i].iov_len;
    return length;
}

/* Copy the pieces of the first `length` bytes; returns how many pieces these are. */
static int cut(const struct iovec *pieces, int count, size_t length, struct iovec *into) {
    int used = 0;
    for (; used < count && length > 0; used++) {
        into[used] = pieces[used];
        if (into[used].iov_len > length)
            into[used].iov_len = length;
        length -= into[used].iov_len;
    }
    return used;
}

static void flip(const struct iovec *pieces, int count, size_t at) {
    for (int i = 0; i < count; at -= pieces[i++].iov_len)
        if (at < pieces[i].iov_len) {
            ((uint8_t *)pieces[i].iov_base)[at] ^= 1u << (at % 8);
            return;
        }
}

typedef ssize_t transfer(int, const struct iovec *, int, off_t, int);

static ssize_t move(enum call call, transfer *real, int fd, const struct iovec *pieces, int count,
                    off_t offset, int flags) {
    if (count > PIECES_MAX || !is_inside(fd))
        return real(fd, pieces, count, offset, flags);
    uint32_t argument = 0;
    enum action action = undergo(call, &argument);
    if (action == FAIL) {
        errno = (int)argument;
        return -1;
    }
    size_t length = length_of(pieces, count);
    size_t half = length / 2 / PAGE * PAGE; /* whole pages: direct I/O knows nothing smaller */
    struct iovec fewer[PIECES_MAX];
    if (action == TEAR) {
        int used = cut(pieces, count, half, fewer);
        ssize_t moved = used > 0 ? real(fd, fewer, used, offset, flags) : 0;
        return moved < 0 ? moved : (ssize_t)length;
    }
    if (action == SHORTEN && half > 0)
        return real(fd, fewer, cut(pieces, count, half, fewer), offset, flags);
    ssize_t moved = real(fd, pieces, count, offset, flags);
    if (action == FLIP && moved > 0) {
        uint64_t number = atomic_load(&rows[call].calls);
        flip(pieces, count, (size_t)(number * 2654435761u) % (size_t)moved);
    }
    return moved;
}

/* The real calls, found once each; a name is what the C library calls it. */
#define REAL(result, name, ...)                                                                    \
    static result (*real)(__VA_ARGS__);                                                            \
    if (real == NULL)                                                                              \
        real = dlsym(RTLD_NEXT, name)

static ssize_t real_readv(int fd, const struct iovec *pieces, int count, off_t offset, int flags) {
    REAL(ssize_t, "preadv64v2", int, const struct iovec *, int, off_t, int);
    return real(fd, pieces, count, offset, flags);
}

static ssize_t real_writev(int fd, const struct iovec *pieces, int count, off_t offset, int flags) {
    REAL(ssize_t, "pwritev64v2", int, const struct iovec *, int, off_t, int);
    return real(fd, pieces, count, offset, flags);
}

static ssize_t real_writev_here(int fd, const struct iovec *pieces, int count, off_t offset,
                                int flags) {
    REAL(ssize_t, "writev", int, const struct iovec *, int);
    (void)offset, (void)flags;
    return real(fd, pieces, count);
}

ssize_t preadv2(int fd, const struct iovec *pieces, int count, off_t offset, int flags) {
    return move(READ, real_readv, fd, pieces, count, offset, flags);
}

ssize_t preadv(int fd, const struct iovec *pieces, int count, off_t offset) {
    return move(READ, real_readv, fd, pieces, count, offset, 0);
}

ssize_t pread(int fd, void *into, size_t length, off_t offset) {
    struct iovec piece = {into, length};
    return move(READ, real_readv, fd, &piece, 1, offset, 0);
}

ssize_t pwritev2(int fd, const struct iovec *pieces, int count, off_t offset, int flags) {
    return move(WRITE, real_writev, fd, pieces, count, offset, flags);
}

ssize_t pwritev(int fd, const struct iovec *pieces, int count, off_t offset) {
    return move(WRITE, real_writev, fd, pieces, count, offset, 0);
}

ssize_t pwrite(int fd, const void *from, size_t length, off_t offset) {
    struct iovec piece = {(void *)from, length};
    return move(WRITE, real_writev, fd, &piece, 1, offset, 0);
}

ssize_t write(int fd, const void *from, size_t length) {
    struct iovec piece = {(void *)from, length};
    return move(WRITE, real_writev_here, fd, &piece, 1, 0, 0);
}

static int is_writing(int flags) { return (flags & O_ACCMODE) != O_RDONLY || (flags & O_CREAT); }

static int open_at(int directory, const char *path, int flags, mode_t mode) {
    REAL(int, "openat64", int, const char *, int, ...);
    int result;
    if (is_inside_at(directory, path) && ends(is_writing(flags) ? OPEN_WRITE : OPEN_READ, &result))
        return -1;
    return real(directory, path, flags, mode);
}

#define MODE_OF(flags)                                                                             \
    mode_t mode = 0;                                                                               \
    if ((flags) & (O_CREAT | __O_TMPFILE)) {                                                       \
        va_list more;                                                                              \
        va_start(more, flags);                                                                     \
        mode = va_arg(more, mode_t);                                                               \
        va_end(more);                                                                              \
    }

int open(const char *path, int flags, ...) {
    MODE_OF(flags)
    return open_at(AT_FDCWD, path, flags, mode);
}

int openat(int directory, const char *path, int flags, ...) {
    MODE_OF(flags)
    return open_at(directory, path, flags, mode);
}

int fallocate(int fd, int mode, off_t offset, off_t length) {
    REAL(int, "fallocate64", int, int, off_t, off_t);
    int result;
    return is_inside(fd) && ends(ALLOCATE, &result) ? result : real(fd, mode, offset, length);
}

/* Unlike the others it returns its error. */
int posix_fallocate(int fd, off_t offset, off_t length) {
    REAL(int, "posix_fallocate64", int, off_t, off_t);
    int result;
    if (is_inside(fd) && ends(ALLOCATE, &result))
        return result < 0 ? errno : 0;
    return real(fd, offset, length);
}

int fdatasync(int fd) {
    REAL(int, "fdatasync", int);
    int result;
    return is_inside(fd) && ends(SYNC, &result) ? result : real(fd);
}

int fsync(int fd) {
    REAL(int, "fsync", int);
    int result;
    return is_inside(fd) && ends(SYNC, &result) ? result : real(fd);
}

int ftruncate(int fd, off_t length) {
    REAL(int, "ftruncate64", int, off_t);
    int result;
    return is_inside(fd) && ends(TRUNCATE, &result) ? result : real(fd, length);
}

int unlink(const char *path) {
    REAL(int, "unlink", const char *);
    int result;
    return is_path_inside(path) && ends(UNLINK, &result) ? result : real(path);
}

int unlinkat(int directory, const char *path, int flags) {
    REAL(int, "unlinkat", int, const char *, int);
    int result;
    return is_inside_at(directory, path) && ends(UNLINK, &result) ? result
                                                                  : real(directory, path, flags);
}

/* Changes names in the directory as unlink does, and fails with it on a read-only volume. */
int rename(const char *from, const char *to) {
    REAL(int, "rename", const char *, const char *);
    int result;
    return is_path_inside(to) && ends(UNLINK, &result) ? result : real(from, to);
}

static int described(int result, struct statvfs *volume, enum action action) {
    if (result == 0 && action == FILL)
        volume->f_bavail = volume->f_bfree = 0;
    return result;
}

int statvfs(const char *path, struct statvfs *volume) {
    REAL(int, "statvfs64", const char *, struct statvfs *);
    uint32_t argument = 0;
    enum action action = is_path_inside(path) ? undergo(STATVFS, &argument) : NONE;
    if (action == FAIL) {
        errno = (int)argument;
        return -1;
    }
    return described(real(path, volume), volume, action);
}

int fstatvfs(int fd, struct statvfs *volume) {
    REAL(int, "fstatvfs64", int, struct statvfs *);
    uint32_t argument = 0;
    enum action action = is_inside(fd) ? undergo(STATVFS, &argument) : NONE;
    if (action == FAIL) {
        errno = (int)argument;
        return -1;
    }
    return described(real(fd, volume), volume, action);
}

/* The names for 64-bit offsets, which are the same functions on 64-bit machines. */
#define ALSO(name, other) extern __typeof(name) other __attribute__((alias(#name)))
ALSO(preadv2, preadv64v2);
ALSO(preadv, preadv64);
ALSO(pread, pread64);
ALSO(pwritev2, pwritev64v2);
ALSO(pwritev, pwritev64);
ALSO(pwrite, pwrite64);
ALSO(open, open64);
ALSO(openat, openat64);
ALSO(fallocate, fallocate64);
ALSO(posix_fallocate, posix_fallocate64);
ALSO(ftruncate, ftruncate64);
extern int statvfs64(const char *, struct statvfs64 *) __attribute__((alias("statvfs")));
extern int fstatvfs64(int, struct statvfs64 *) __attribute__((alias("fstatvfs")));
