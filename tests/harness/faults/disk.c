/* A disk that remembers what was flushed and that can be full, for processes under test (LD_PRELOAD).
 *
 * Watches files beneath $SHOAL_DISK_ROOT. Every operation that changes them is appended to $SHOAL_DISK_TRACE, in order,
 * as: kind (1 byte), three 8-byte little-endian numbers (offset or size, length of the first text, length of the second),
 * the path, the data (or the second path). `disk_available(bytes)` sets how much the files may still grow; -1: no limit.
 * `disk_fails_flushes(1)` lets every flush fail with EIO, whatever was written before it; 0: no longer.
 *
 * While there is a file $SHOAL_DISK_SLOW, the disk is slow: it holds two numbers, milliseconds that a flush takes longer
 * and microseconds that a write does.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char root[PATH_MAX];
static int trace = -1;
static int64_t available = -1;
static int fails_flushes;
static const char *slow;

__attribute__((constructor)) static void start(void) {
  const char *where = getenv("SHOAL_DISK_ROOT"), *into = getenv("SHOAL_DISK_TRACE");
  slow = getenv("SHOAL_DISK_SLOW");
  if (where) snprintf(root, sizeof root, "%s/", where);
  if (into) trace = syscall(SYS_openat, AT_FDCWD, into, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

void disk_available(int64_t bytes) { available = bytes; }
void disk_fails_flushes(int fails) { fails_flushes = fails; }

static int watched(const char *path) { return root[0] && path && strncmp(path, root, strlen(root)) == 0; }

static int path_of(int fd, char *path) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, PATH_MAX - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return watched(path) || (root[0] && strlen(path) + 1 == strlen(root) && strncmp(path, root, strlen(path)) == 0);
}

static void linger(int flushes) {
  if (!slow) return;
  int fd = syscall(SYS_openat, AT_FDCWD, slow, O_RDONLY | O_CLOEXEC, 0);
  if (fd < 0) return;
  char text[64] = {0};
  long flush_ms = 0, write_us = 0;
  if (syscall(SYS_read, fd, text, sizeof text - 1) > 0) sscanf(text, "%ld %ld", &flush_ms, &write_us);
  syscall(SYS_close, fd);
  long us = flushes ? flush_ms * 1000 : write_us;
  struct timespec left = {us / 1000000, us % 1000000 * 1000};
  while (nanosleep(&left, &left) < 0 && errno == EINTR) {}
}

static void put(const void *data, size_t length) {
  while (length > 0) {
    ssize_t done = syscall(SYS_write, trace, data, length);
    if (done <= 0) abort();
    data = (const char *)data + done;
    length -= done;
  }
}

static void record(char kind, int64_t number, const char *path, const void *data, size_t length) {
  if (trace < 0) return;
  char head[25] = {kind};
  int64_t numbers[3] = {number, (int64_t)strlen(path), (int64_t)length};
  memcpy(head + 1, numbers, sizeof numbers);
  put(head, sizeof head);
  put(path, strlen(path));
  put(data, length);
}

static int64_t size_of(int fd) {
  struct stat found;
  return fstat(fd, &found) == 0 ? (int64_t)found.st_size : 0;
}

/* How much of a write that ends at `end` fits; takes it from what is available. */
static int64_t granted(int fd, int64_t offset, int64_t length) {
  if (available < 0) return length;
  int64_t size = size_of(fd), growth = offset + length - size;
  if (growth <= 0) return length;
  int64_t short_of = growth - available;
  if (short_of > 0) {
    if (length - short_of <= 0) return 0;
    length -= short_of;
    growth = available;
  }
  available -= growth > 0 ? growth : 0;
  return length;
}

static void give_back(int64_t bytes) {
  if (available >= 0 && bytes > 0) available += bytes;
}

static ssize_t write_at(int fd, const void *data, size_t length, int64_t offset, int positioned) {
  char path[PATH_MAX];
  if (!path_of(fd, path))
    return positioned ? syscall(SYS_pwrite64, fd, data, length, offset) : syscall(SYS_write, fd, data, length);
  linger(0);
  pthread_mutex_lock(&lock);
  int64_t at = positioned ? offset : (fcntl(fd, F_GETFL) & O_APPEND) ? size_of(fd) : lseek(fd, 0, SEEK_CUR);
  int64_t fits = granted(fd, at, length);
  ssize_t done = -1;
  if (fits == 0 && length > 0) {
    errno = ENOSPC;
  } else {
    done = positioned ? syscall(SYS_pwrite64, fd, data, fits, offset) : syscall(SYS_write, fd, data, fits);
    if (done > 0) record('w', at, path, data, done);
  }
  int kept = errno;
  pthread_mutex_unlock(&lock);
  errno = kept;
  return done;
}

ssize_t write(int fd, const void *data, size_t length) { return write_at(fd, data, length, 0, 0); }
ssize_t pwrite(int fd, const void *data, size_t length, off_t offset) { return write_at(fd, data, length, offset, 1); }
ssize_t pwrite64(int fd, const void *data, size_t length, off64_t offset) {
  return write_at(fd, data, length, offset, 1);
}

static int resize(int fd, int64_t size) {
  char path[PATH_MAX];
  if (!path_of(fd, path)) return syscall(SYS_ftruncate, fd, size);
  pthread_mutex_lock(&lock);
  int64_t before = size_of(fd);
  int done = syscall(SYS_ftruncate, fd, size);
  if (done == 0) {
    give_back(before - size);
    record('t', size, path, "", 0);
  }
  pthread_mutex_unlock(&lock);
  return done;
}
int ftruncate(int fd, off_t size) { return resize(fd, size); }
int ftruncate64(int fd, off64_t size) { return resize(fd, size); }

static int allocate(int fd, int64_t offset, int64_t length) {
  char path[PATH_MAX];
  if (!path_of(fd, path)) return syscall(SYS_fallocate, fd, 0, offset, length) == 0 ? 0 : errno;
  int failed = 0;
  pthread_mutex_lock(&lock);
  int64_t growth = offset + length - size_of(fd);
  if (available >= 0 && growth > available) {
    failed = ENOSPC;
  } else {
    if (available >= 0 && growth > 0) available -= growth;
    failed = syscall(SYS_ftruncate, fd, offset + length) == 0 ? 0 : errno;
    if (!failed) record('t', offset + length, path, "", 0);
  }
  pthread_mutex_unlock(&lock);
  return failed;
}
int posix_fallocate(int fd, off_t offset, off_t length) { return allocate(fd, offset, length); }
int posix_fallocate64(int fd, off64_t offset, off64_t length) { return allocate(fd, offset, length); }

static int flush(int fd, long call) {
  char path[PATH_MAX];
  int known = path_of(fd, path);
  if (known) linger(1);
  if (known && fails_flushes) {
    errno = EIO;
    return -1;
  }
  int done = syscall(call, fd);
  if (known && done == 0) {
    pthread_mutex_lock(&lock);
    record('s', 0, path, "", 0);
    pthread_mutex_unlock(&lock);
  }
  return done;
}
int fsync(int fd) { return flush(fd, SYS_fsync); }
int fdatasync(int fd) { return flush(fd, SYS_fdatasync); }

static int open_at(int folder, const char *path, int flags, mode_t mode) {
  struct stat before;
  int ours = watched(path) && (flags & (O_CREAT | O_TRUNC));
  int existed = ours && stat(path, &before) == 0;
  int fd = syscall(SYS_openat, folder, path, flags, mode);
  if (ours && fd >= 0) {
    pthread_mutex_lock(&lock);
    if (!existed) record('c', 0, path, "", 0);
    else if ((flags & O_TRUNC) && before.st_size > 0) {
      give_back(before.st_size);
      record('t', 0, path, "", 0);
    }
    pthread_mutex_unlock(&lock);
  }
  return fd;
}

#define OPEN(folder)                      \
  {                                                  \
    mode_t mode = 0;                                 \
    if (flags & (O_CREAT | __O_TMPFILE)) {           \
      va_list rest;                                  \
      va_start(rest, flags);                         \
      mode = va_arg(rest, mode_t);                   \
      va_end(rest);                                  \
    }                                                \
    return open_at(folder, path, flags, mode);       \
  }
int open(const char *path, int flags, ...) OPEN(AT_FDCWD)
int open64(const char *path, int flags, ...) OPEN(AT_FDCWD)
int openat(int folder, const char *path, int flags, ...) OPEN(folder)
int openat64(int folder, const char *path, int flags, ...) OPEN(folder)

int rename(const char *from, const char *to) {
  struct stat replaced;
  int64_t freed = watched(to) && stat(to, &replaced) == 0 ? (int64_t)replaced.st_size : 0;
  int done = syscall(SYS_renameat, AT_FDCWD, from, AT_FDCWD, to);
  if (done == 0 && (watched(from) || watched(to))) {
    pthread_mutex_lock(&lock);
    give_back(freed);
    record('r', 0, from, to, strlen(to));
    pthread_mutex_unlock(&lock);
  }
  return done;
}

int unlink(const char *path) {
  struct stat removed;
  int64_t freed = watched(path) && stat(path, &removed) == 0 ? (int64_t)removed.st_size : 0;
  int done = syscall(SYS_unlinkat, AT_FDCWD, path, 0);
  if (done == 0 && watched(path)) {
    pthread_mutex_lock(&lock);
    give_back(freed);
    record('u', 0, path, "", 0);
    pthread_mutex_unlock(&lock);
  }
  return done;
}

int mkdir(const char *path, mode_t mode) {
  int done = syscall(SYS_mkdirat, AT_FDCWD, path, mode);
  if (done == 0 && watched(path)) {
    pthread_mutex_lock(&lock);
    record('d', 0, path, "", 0);
    pthread_mutex_unlock(&lock);
  }
  return done;
}
