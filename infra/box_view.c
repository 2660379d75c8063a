/* What programs in a box see of its host's clock and processors: the declared ones, the same on every host and every day.

   Contract: a library that /etc/ld.so.preload of the root file system loads into every dynamically linked program (infra/rootfs.py
   compiles it there, with tcc). It reads once, at its start, the limits RLIMIT_LOCKS, which Linux has ignored since 2.4.25 and
   which every process inherits from its parent, whatever becomes of its environment:

       hard = (microseconds since 1970 at which the box's clock began) * 1024 + processors      0 processors: the host's
       soft = what the box's clock showed then, in microseconds since 1970

   No limit set: nothing changes. The clock runs on from there: only dates are moved, never durations and the monotonic clocks.
   Times of files move along; what was put into the box just before its clock began is as old as the clock; files of the root file
   system keep their times (Python compares them with its caches). Absolute deadlines are moved back. Processors: sysconf,
   get_nprocs, affinity, and what is read from /proc/cpuinfo, /proc/stat (without the host's load) and /sys/devices/system/cpu/online.
   Nothing is pinned: the host's scheduler stays free.
   Gaps: programs that do without libc's calls (statically linked, Go) see the host. So do file times that libc reads for itself
   (nftw, glob), openat2 and openat of relative paths. A program can undo all this for itself: it is for repeatable runs, it protects nothing. */

#if defined(__x86_64__)
enum { SYS_fstatat = 262, SYS_utimensat = 280, SYS_statx = 332, SYS_memfd_create = 319, SYS_clock_gettime = 228 };
#elif defined(__aarch64__)
enum { SYS_fstatat = 79, SYS_utimensat = 88, SYS_statx = 291, SYS_memfd_create = 279, SYS_clock_gettime = 113 };
#else
#error "box_view.c knows x86_64 and aarch64"
#endif

typedef unsigned long ulong;
struct timespec { long s, ns; };
struct timeval { long s, us; };
struct itimerspec { struct timespec interval, value; };
struct FILE;

extern void *dlsym(void *, const char *);
extern int getrlimit(int, ulong *);
extern long read(int, void *, ulong), write(int, const void *, ulong), lseek(int, long, int);
extern int close(int);
extern struct FILE *fdopen(int, const char *);
extern void *memset(void *, int, ulong);
extern int strcmp(const char *, const char *);

enum { RLIMIT_LOCKS = 10, AT_FDCWD = -100, AT_SYMLINK_NOFOLLOW = 0x100, AT_EMPTY_PATH = 0x1000, ABSOLUTE = 1, CLOSE_ON_EXEC = 02000000 };
enum { CLOCK_REALTIME = 0, CLOCK_REALTIME_COARSE = 5, CLOCK_REALTIME_ALARM = 8, CLOCK_BOOTTIME = 7, CLOCK_TAI = 11 };
enum { CONFIGURED = 83, ONLINE = 84 };
#define LEAST_DATE 500000000L /* seconds; a deadline below is one of the monotonic clock */
#define BILLION 1000000000L
#define PUT_BEFORE 3600 /* seconds; a file that is at most this much older than the clock was put by the box's owner */

static int known, processors;
static struct timespec began, shown; /* the kernel's time at which the box's clock began, and what it showed */
static long offset_s, offset_ns;     /* shown - began; 0 <= offset_ns < BILLION */

#define NEXT(result, name, ...) typedef result (*name##_call)(__VA_ARGS__); static name##_call next_##name;
NEXT(long, syscall, long, long, long, long, long, long, long)
NEXT(int, clock_gettime, int, struct timespec *)
NEXT(long, sysconf, int)
NEXT(int, sched_getcpu, void)
NEXT(int, sched_getaffinity, int, ulong, ulong *)
NEXT(int, pthread_getaffinity_np, ulong, ulong, ulong *)
NEXT(int, open, const char *, int, int)
NEXT(int, openat, int, const char *, int, int)
NEXT(struct FILE *, fopen, const char *, const char *)
NEXT(int, pthread_cond_timedwait, void *, void *, const struct timespec *)
NEXT(int, pthread_cond_clockwait, void *, void *, int, const struct timespec *)
NEXT(int, pthread_mutex_timedlock, void *, const struct timespec *)
NEXT(int, pthread_mutex_clocklock, void *, int, const struct timespec *)
NEXT(int, pthread_rwlock_timedrdlock, void *, const struct timespec *)
NEXT(int, pthread_rwlock_timedwrlock, void *, const struct timespec *)
NEXT(int, pthread_rwlock_clockrdlock, void *, int, const struct timespec *)
NEXT(int, pthread_rwlock_clockwrlock, void *, int, const struct timespec *)
NEXT(int, pthread_timedjoin_np, ulong, void **, const struct timespec *)
NEXT(int, pthread_clockjoin_np, ulong, void **, int, const struct timespec *)
NEXT(int, sem_timedwait, void *, const struct timespec *)
NEXT(int, sem_clockwait, void *, int, const struct timespec *)
NEXT(int, cnd_timedwait, void *, void *, const struct timespec *)
NEXT(int, mtx_timedlock, void *, const struct timespec *)
NEXT(int, mq_timedsend, int, const char *, ulong, unsigned, const struct timespec *)
NEXT(long, mq_timedreceive, int, char *, ulong, unsigned *, const struct timespec *)
NEXT(int, clock_nanosleep, int, int, const struct timespec *, struct timespec *)
NEXT(int, timer_settime, void *, int, const struct itimerspec *, struct itimerspec *)
NEXT(int, timerfd_settime, int, int, const struct itimerspec *, struct itimerspec *)

/* Read the limits anew. Called at the start of a program, and by a fork that takes another box's place (entering.py). */
void bessemer_view(void)
{
    ulong limit[2];
    long now, then;
    processors = offset_s = offset_ns = 0;
    began.s = shown.s = began.ns = shown.ns = 0;
    if (getrlimit(RLIMIT_LOCKS, limit) == 0 && limit[1] != ~0UL && limit[0] != ~0UL) {
        processors = limit[1] % 1024;
        now = limit[1] / 1024;
        then = limit[0];
        began.s = now / 1000000;
        began.ns = now % 1000000 * 1000;
        shown.s = then / 1000000;
        shown.ns = then % 1000000 * 1000;
        offset_s = shown.s - began.s;
        offset_ns = shown.ns - began.ns;
        if (offset_ns < 0) {
            offset_ns += BILLION;
            offset_s--;
        }
    }
#define FIND(name) next_##name = (name##_call)dlsym((void *)-1L, #name);
    if (!known) {
        FIND(syscall) FIND(clock_gettime) FIND(sysconf) FIND(sched_getcpu) FIND(sched_getaffinity) FIND(pthread_getaffinity_np)
        FIND(open) FIND(openat) FIND(fopen) FIND(pthread_cond_timedwait) FIND(pthread_cond_clockwait)
        FIND(pthread_mutex_timedlock) FIND(pthread_mutex_clocklock) FIND(pthread_rwlock_timedrdlock)
        FIND(pthread_rwlock_timedwrlock) FIND(pthread_rwlock_clockrdlock) FIND(pthread_rwlock_clockwrlock)
        FIND(pthread_timedjoin_np) FIND(pthread_clockjoin_np) FIND(sem_timedwait) FIND(sem_clockwait) FIND(cnd_timedwait)
        FIND(mtx_timedlock) FIND(mq_timedsend) FIND(mq_timedreceive) FIND(clock_nanosleep) FIND(timer_settime)
        FIND(timerfd_settime)
    }
    known = 1;
}

__attribute__((constructor)) static void start(void) { if (!known) bessemer_view(); }

/* ------------------------------------------------------------------------------------------------------------------ the date */

static void move(struct timespec *t)
{
    t->s += offset_s;
    t->ns += offset_ns;
    if (t->ns >= BILLION) {
        t->ns -= BILLION;
        t->s++;
    }
}

static void move_back(struct timespec *t)
{
    t->s -= offset_s;
    t->ns -= offset_ns;
    if (t->ns < 0) {
        t->ns += BILLION;
        t->s--;
    }
}

static int is_date(int clock)
{
    return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_REALTIME_ALARM || clock == CLOCK_TAI;
}

int clock_gettime(int clock, struct timespec *t)
{
    int failed;
    start();
    failed = next_clock_gettime(clock, t);
    if (!failed && is_date(clock)) move(t);
    return failed;
}

int gettimeofday(struct timeval *t, int *zone)
{
    struct timespec now;
    if (zone) zone[0] = zone[1] = 0;
    if (!t) return 0;
    if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
    t->s = now.s;
    t->us = now.ns / 1000;
    return 0;
}

long time(long *t)
{
    struct timespec now;
    if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
    if (t) *t = now.s;
    return now.s;
}

int timespec_get(struct timespec *t, int base)
{
    return base == 1 && clock_gettime(CLOCK_REALTIME, t) == 0 ? base : 0;
}

/* ------------------------------------------------------------------------------------------------------------ times of files */

static int before(long s, long ns, const struct timespec *t) { return s < t->s || (s == t->s && ns < t->ns); }

static void file_time(long *s, long *ns)
{
    struct timespec t;
    if (!offset_s && !offset_ns) return;
    t.s = *s;
    t.ns = *ns;
    if (!before(t.s, t.ns, &began)) move(&t);
    else if (t.s >= began.s - PUT_BEFORE) t = shown;
    *s = t.s;
    *ns = t.ns;
}

static int status(int folder, const char *path, long *out, int flags)
{
    int failed, field;
    start();
    failed = next_syscall(SYS_fstatat, folder, (long)path, (long)out, flags, 0, 0);
    if (!failed)
        for (field = 9; field < 15; field += 2) file_time(out + field, out + field + 1); /* st_atim, st_mtim, st_ctim */
    return failed;
}

int stat(const char *path, long *out) { return status(AT_FDCWD, path, out, 0); }
int lstat(const char *path, long *out) { return status(AT_FDCWD, path, out, AT_SYMLINK_NOFOLLOW); }
int fstat(int fd, long *out) { return status(fd, "", out, AT_EMPTY_PATH); }
int fstatat(int folder, const char *path, long *out, int flags) { return status(folder, path, out, flags); }
int stat64(const char *path, long *out) { return status(AT_FDCWD, path, out, 0); }
int lstat64(const char *path, long *out) { return status(AT_FDCWD, path, out, AT_SYMLINK_NOFOLLOW); }
int fstat64(int fd, long *out) { return status(fd, "", out, AT_EMPTY_PATH); }
int fstatat64(int folder, const char *path, long *out, int flags) { return status(folder, path, out, flags); }
int __xstat(int v, const char *path, long *out) { return status(AT_FDCWD, path, out, 0); }
int __lxstat(int v, const char *path, long *out) { return status(AT_FDCWD, path, out, AT_SYMLINK_NOFOLLOW); }
int __fxstat(int v, int fd, long *out) { return status(fd, "", out, AT_EMPTY_PATH); }
int __fxstatat(int v, int folder, const char *path, long *out, int flags) { return status(folder, path, out, flags); }
int __xstat64(int v, const char *path, long *out) { return status(AT_FDCWD, path, out, 0); }
int __lxstat64(int v, const char *path, long *out) { return status(AT_FDCWD, path, out, AT_SYMLINK_NOFOLLOW); }
int __fxstat64(int v, int fd, long *out) { return status(fd, "", out, AT_EMPTY_PATH); }
int __fxstatat64(int v, int folder, const char *path, long *out, int flags) { return status(folder, path, out, flags); }

int statx(int folder, const char *path, int flags, unsigned mask, long *out)
{
    int failed, field;
    start();
    failed = next_syscall(SYS_statx, folder, (long)path, flags, mask, (long)out, 0);
    if (!failed)
        for (field = 8; field < 16; field += 2) { /* stx_atime, stx_btime, stx_ctime, stx_mtime: 64 bits of s, 32 of ns */
            long ns = *(unsigned *)(out + field + 1);
            if (out[field]) file_time(out + field, &ns);
            *(unsigned *)(out + field + 1) = ns;
        }
    return failed;
}

/* libuv, under Node, asks for file times like this. A caller with fewer arguments leaves the rest to chance, as to libc's own. */
long syscall(long number, long a, long b, long c, long d, long e, long f)
{
    start();
    if (number == SYS_statx) return statx(a, (const char *)b, c, d, (long *)e);
    if (number == SYS_fstatat) return status(a, (const char *)b, (long *)c, d);
    if (number == SYS_clock_gettime) return clock_gettime(a, (struct timespec *)b);
    return next_syscall(number, a, b, c, d, e, f);
}

static int set_times(int folder, const char *path, const struct timespec *times, int flags)
{
    struct timespec moved[2];
    int i;
    start();
    if (!times) return next_syscall(SYS_utimensat, folder, (long)path, 0, flags, 0, 0);
    for (i = 0; i < 2; i++) {
        moved[i] = times[i];
        if (moved[i].ns >= 0 && moved[i].ns < BILLION && !before(moved[i].s, moved[i].ns, &shown)) move_back(moved + i);
    }
    return next_syscall(SYS_utimensat, folder, (long)path, (long)moved, flags, 0, 0);
}

static int set_microseconds(int folder, const char *path, const struct timeval *times, int flags)
{
    struct timespec fine[2];
    int i;
    if (!times) return set_times(folder, path, 0, flags);
    for (i = 0; i < 2; i++) {
        fine[i].s = times[i].s;
        fine[i].ns = times[i].us < 0 || times[i].us > 999999 ? -1 : times[i].us * 1000; /* -1: refused, as it should be */
    }
    return set_times(folder, path, fine, flags);
}

int utimensat(int folder, const char *path, const struct timespec *t, int flags) { return set_times(folder, path, t, flags); }
int futimens(int fd, const struct timespec *t) { return set_times(fd, 0, t, 0); }
int utimes(const char *path, const struct timeval *t) { return set_microseconds(AT_FDCWD, path, t, 0); }
int lutimes(const char *path, const struct timeval *t) { return set_microseconds(AT_FDCWD, path, t, AT_SYMLINK_NOFOLLOW); }
int futimes(int fd, const struct timeval *t) { return set_microseconds(fd, 0, t, 0); }
int futimesat(int folder, const char *path, const struct timeval *t) { return set_microseconds(folder, path, t, 0); }

int utime(const char *path, const long *seconds)
{
    struct timespec t[2];
    if (!seconds) return set_times(AT_FDCWD, path, 0, 0);
    t[0].s = seconds[0];
    t[1].s = seconds[1];
    t[0].ns = t[1].ns = 0;
    return set_times(AT_FDCWD, path, t, 0);
}

/* ----------------------------------------------------------------------------------------------------- absolute deadlines */

static const struct timespec *due(const struct timespec *t, struct timespec *room)
{
    start();
    if (!t || t->s < LEAST_DATE) return t;
    *room = *t;
    move_back(room);
    return room;
}

#define DUE(t) struct timespec room; const struct timespec *at = due(t, &room);
int pthread_cond_timedwait(void *c, void *m, const struct timespec *t) { DUE(t) return next_pthread_cond_timedwait(c, m, at); }
int pthread_cond_clockwait(void *c, void *m, int k, const struct timespec *t) { DUE(t) return next_pthread_cond_clockwait(c, m, k, at); }
int pthread_mutex_timedlock(void *m, const struct timespec *t) { DUE(t) return next_pthread_mutex_timedlock(m, at); }
int pthread_mutex_clocklock(void *m, int k, const struct timespec *t) { DUE(t) return next_pthread_mutex_clocklock(m, k, at); }
int pthread_rwlock_timedrdlock(void *l, const struct timespec *t) { DUE(t) return next_pthread_rwlock_timedrdlock(l, at); }
int pthread_rwlock_timedwrlock(void *l, const struct timespec *t) { DUE(t) return next_pthread_rwlock_timedwrlock(l, at); }
int pthread_rwlock_clockrdlock(void *l, int k, const struct timespec *t) { DUE(t) return next_pthread_rwlock_clockrdlock(l, k, at); }
int pthread_rwlock_clockwrlock(void *l, int k, const struct timespec *t) { DUE(t) return next_pthread_rwlock_clockwrlock(l, k, at); }
int pthread_timedjoin_np(ulong h, void **r, const struct timespec *t) { DUE(t) return next_pthread_timedjoin_np(h, r, at); }
int pthread_clockjoin_np(ulong h, void **r, int k, const struct timespec *t) { DUE(t) return next_pthread_clockjoin_np(h, r, k, at); }
int sem_timedwait(void *s, const struct timespec *t) { DUE(t) return next_sem_timedwait(s, at); }
int sem_clockwait(void *s, int k, const struct timespec *t) { DUE(t) return next_sem_clockwait(s, k, at); }
int cnd_timedwait(void *c, void *m, const struct timespec *t) { DUE(t) return next_cnd_timedwait(c, m, at); }
int mtx_timedlock(void *m, const struct timespec *t) { DUE(t) return next_mtx_timedlock(m, at); }
int mq_timedsend(int q, const char *d, ulong n, unsigned p, const struct timespec *t) { DUE(t) return next_mq_timedsend(q, d, n, p, at); }
long mq_timedreceive(int q, char *d, ulong n, unsigned *p, const struct timespec *t) { DUE(t) return next_mq_timedreceive(q, d, n, p, at); }

int clock_nanosleep(int clock, int flags, const struct timespec *t, struct timespec *left)
{
    DUE(t)
    return next_clock_nanosleep(clock, flags, flags & ABSOLUTE ? at : t, left);
}

static const struct itimerspec *alarm_at(int flags, const struct itimerspec *t, struct itimerspec *room)
{
    start();
    if (!t || !(flags & ABSOLUTE) || t->value.s < LEAST_DATE) return t;
    *room = *t;
    move_back(&room->value);
    return room;
}

int timer_settime(void *timer, int flags, const struct itimerspec *t, struct itimerspec *old)
{
    struct itimerspec room;
    const struct itimerspec *at = alarm_at(flags, t, &room);
    return next_timer_settime(timer, flags, at, old);
}

int timerfd_settime(int fd, int flags, const struct itimerspec *t, struct itimerspec *old)
{
    struct itimerspec room;
    const struct itimerspec *at = alarm_at(flags, t, &room);
    return next_timerfd_settime(fd, flags, at, old);
}

/* ---------------------------------------------------------------------------------------------------------- the processors */

long sysconf(int name)
{
    start();
    return processors && (name == CONFIGURED || name == ONLINE) ? processors : next_sysconf(name);
}

int get_nprocs(void) { return sysconf(ONLINE); }
int get_nprocs_conf(void) { return sysconf(CONFIGURED); }

int sched_getcpu(void)
{
    int cpu;
    start();
    cpu = next_sched_getcpu();
    return processors && cpu >= 0 ? cpu % processors : cpu;
}

static void first(ulong size, ulong *mask)
{
    int i;
    if (!processors || (ulong)processors > size * 8) return;
    memset(mask, 0, size);
    for (i = 0; i < processors; i++) mask[i / 64] |= 1UL << i % 64;
}

int sched_getaffinity(int pid, ulong size, ulong *mask)
{
    int failed;
    start();
    failed = next_sched_getaffinity(pid, size, mask);
    if (!failed) first(size, mask);
    return failed;
}

int pthread_getaffinity_np(ulong thread, ulong size, ulong *mask)
{
    int failed;
    start();
    failed = next_pthread_getaffinity_np(thread, size, mask);
    if (!failed) first(size, mask);
    return failed;
}

enum { PLAIN, CPUINFO, STAT, LIST };

static int which(const char *path)
{
    start();
    if (!processors || !path || path[0] != '/') return PLAIN;
    if (path[1] == 'p') return !strcmp(path, "/proc/cpuinfo") ? CPUINFO : !strcmp(path, "/proc/stat") ? STAT : PLAIN;
    if (path[1] != 's') return PLAIN;
    return !strcmp(path, "/sys/devices/system/cpu/online") || !strcmp(path, "/sys/devices/system/cpu/present")
           || !strcmp(path, "/sys/devices/system/cpu/possible") ? LIST : PLAIN;
}

static void text(int fd, const char *words)
{
    int length = 0;
    while (words[length]) length++;
    write(fd, words, length);
}

static void number(int fd, long value)
{
    char digits[24];
    int at = sizeof digits;
    do digits[--at] = '0' + value % 10; while (value /= 10);
    write(fd, digits + at, sizeof digits - at);
}

/* The host's first blocks; on a host with fewer processors, blocks with nothing but a number. */
static void cpuinfo(int to)
{
    char part[4096];
    int blocks = 0, ended = 0, from = next_open("/proc/cpuinfo", CLOSE_ON_EXEC, 0);
    long size, at;
    while (from >= 0 && blocks < processors && (size = read(from, part, sizeof part)) > 0) {
        for (at = 0; at < size && blocks < processors; at++) {
            blocks += ended && part[at] == '\n';
            ended = part[at] == '\n';
        }
        write(to, part, at);
    }
    if (from >= 0) close(from);
    for (; blocks < processors; blocks++) {
        text(to, "processor\t: ");
        number(to, blocks);
        text(to, "\n\n");
    }
}

/* Nothing has run since the host came up, by the box's clock. */
static void counters(int to)
{
    struct timespec now, up;
    int cpu;
    clock_gettime(CLOCK_REALTIME, &now);
    clock_gettime(CLOCK_BOOTTIME, &up);
    for (cpu = -1; cpu < processors; cpu++) {
        text(to, cpu < 0 ? "cpu " : "cpu");
        if (cpu >= 0) number(to, cpu);
        text(to, " 0 0 0 ");
        number(to, up.s * 100 * (cpu < 0 ? processors : 1));
        text(to, " 0 0 0 0 0 0\n");
    }
    text(to, "intr 0\nctxt 0\nbtime ");
    number(to, now.s - up.s);
    text(to, "\nprocesses 1\nprocs_running 1\nprocs_blocked 0\nsoftirq 0 0 0 0 0 0 0 0 0 0 0\n");
}

static int view(const char *path, int flags)
{
    int to, kind = which(path);
    if (kind == PLAIN || (flags & 3)) return -1;
    to = next_syscall(SYS_memfd_create, (long)"cpus", flags & CLOSE_ON_EXEC ? 1 : 0, 0, 0, 0, 0);
    if (to < 0) return -1;
    if (kind == CPUINFO) cpuinfo(to);
    if (kind == STAT) counters(to);
    if (kind == LIST) {
        text(to, processors > 1 ? "0-" : "");
        number(to, processors - 1);
        text(to, "\n");
    }
    lseek(to, 0, 0);
    return to;
}

int open(const char *path, int flags, int mode)
{
    int fd = view(path, flags);
    return fd >= 0 ? fd : next_open(path, flags, mode);
}

int openat(int folder, const char *path, int flags, int mode)
{
    int fd = view(path, flags);
    return fd >= 0 ? fd : next_openat(folder, path, flags, mode);
}

int open64(const char *path, int flags, int mode) { return open(path, flags, mode); }
int openat64(int folder, const char *path, int flags, int mode) { return openat(folder, path, flags, mode); }
int __open_2(const char *path, int flags) { return open(path, flags, 0); }
int __open64_2(const char *path, int flags) { return open(path, flags, 0); }
int __openat_2(int folder, const char *path, int flags) { return openat(folder, path, flags, 0); }
int __openat64_2(int folder, const char *path, int flags) { return openat(folder, path, flags, 0); }

struct FILE *fopen(const char *path, const char *mode)
{
    int fd = mode && mode[0] == 'r' ? view(path, 0) : -1;
    return fd >= 0 ? fdopen(fd, "r") : next_fopen(path, mode);
}

struct FILE *fopen64(const char *path, const char *mode) { return fopen(path, mode); }
