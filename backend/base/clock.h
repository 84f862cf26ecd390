// SPDX-License-Identifier: Apache-2.0
/* Time: nanoseconds of CLOCK_MONOTONIC, CPU nanoseconds of this thread, and deadlines on condition variables. */
#pragma once

#include <pthread.h>
#include <stdint.h>

uint64_t sluice_now_ns(void);
static inline double sluice_seconds(uint64_t ns) { return (double)ns / 1e9; }
uint64_t sluice_thread_cpu_ns(void);
/* Returns the CPU nanoseconds of one sluice_thread_cpu_ns(), which is a system call: the smallest of several means. */
uint64_t sluice_thread_cpu_reading_ns(void);

/* A condition variable that waits on the monotonic clock. */
void sluice_cond_init(pthread_cond_t* cond);
/* Waits until signalled or until sluice_now_ns() >= deadline_ns; returns 0, or ETIMEDOUT. May wake spuriously. */
int sluice_cond_wait_until(pthread_cond_t* cond, pthread_mutex_t* mutex, uint64_t deadline_ns);
