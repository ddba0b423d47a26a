/* Has the wall clock of a process step by an hour, back and forth, every 300 ms.
   For LD_PRELOAD; the monotonic clock, by which it decides, stays as it is. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

static int (*real_clock_gettime)(clockid_t, struct timespec *);

static time_t step(void) {
  struct timespec now;
  real_clock_gettime(CLOCK_MONOTONIC, &now);
  long part = now.tv_sec * 10 + now.tv_nsec / 100000000;
  return part / 3 % 2 ? 3600 : -3600;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
  if (!real_clock_gettime)
    real_clock_gettime = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int result = real_clock_gettime(clock, at);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    at->tv_sec += step();
  return result;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
  (void)zone;
  struct timespec now;
  int result = clock_gettime(CLOCK_REALTIME, &now);
  at->tv_sec = now.tv_sec;
  at->tv_usec = now.tv_nsec / 1000;
  return result;
}

time_t time(time_t *at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at)
    *at = now.tv_sec;
  return now.tv_sec;
}
