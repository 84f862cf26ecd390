// SPDX-License-Identifier: Apache-2.0
/* The public calls of swaps: a thread copies pieces of memory to a tier and back. */
#include "sluice/swap.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "backend/base/alloc.h"
#include "backend/base/clock.h"
#include "backend/base/file_io.h"
#include "backend/base/math.h"
#include "backend/base/structs.h"
#include "backend/memory/pool.h"
#include "backend/swap/order.h"

/* ---- tiers: blocks of host memory, or a file that was unlinked ---- */

/* A place of a tier. */
typedef struct place_s {
  void* memory; /* in host memory */
  uint64_t at;  /* in a file */
  uint64_t bytes;
} place_t;

typedef struct tier_s {
  sluice_allocator_t* allocator;
  sluice_pool_t pool; /* of host memory */
  int32_t is_file;
  char path[PATH_MAX];
  sluice_descriptor_t descriptor;
  uint64_t budget, used;
  place_t* taken; /* of a file, by `at` */
  int32_t count, capacity;
} tier_t;

enum { PAGE = 4096 };

static uint64_t whole_pages(uint64_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

static sluice_status_t open_file(tier_t* tier, const char* path) {
  if (snprintf(tier->path, sizeof tier->path, "%s", path) >= (int)sizeof tier->path)
    return SLUICE_FAIL(SLUICE_E_INVALID_ARGUMENT, "sluice_swap_config_t: path has over %d bytes", PATH_MAX - 1);
  /* O_EXCL and O_NOFOLLOW: no other process may have the file open, and a symbolic link is refused. */
  if (sluice_descriptor_open(&tier->descriptor, path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW) < 0) {
    return SLUICE_FAIL(SLUICE_E_EXTERNAL, "swap: %s: creating the file: %s", path, strerror(errno));
  }
  if (unlink(path) == 0) return SLUICE_OK;
  const int error = errno;
  sluice_descriptor_close(&tier->descriptor);
  return SLUICE_FAIL(SLUICE_E_EXTERNAL, "swap: %s: unlinking the file: %s", path, strerror(error));
}

/* path: NULL: host memory. Errors: EXTERNAL, NO_MEMORY. The tier stays at its address until close. */
static sluice_status_t tier_open(tier_t* tier, const char* path, uint64_t budget, sluice_allocator_t* allocator) {
  *tier = (tier_t){.allocator = allocator, .budget = budget, .is_file = path != NULL};
  tier->descriptor.fd = -1;
  if (path != NULL) SLUICE_TRY(open_file(tier, path));
  sluice_pool_init(&tier->pool, allocator, 0);
  return SLUICE_OK;
}

static void tier_close(tier_t* tier) {
  sluice_pool_deinit(&tier->pool);
  sluice_descriptor_close(&tier->descriptor);
  sluice_free(tier->allocator, tier->taken, (uint64_t)tier->capacity * sizeof *tier->taken);
}

static sluice_status_t make_room(tier_t* tier) {
  if (tier->count < tier->capacity) return SLUICE_OK;
  const int32_t capacity = 2 * tier->capacity + 16;
  place_t* taken = sluice_alloc(tier->allocator, (uint64_t)capacity * sizeof *taken, "swap: places in the file");
  if (taken == NULL) return sluice_alloc_status();
  if (tier->count > 0) memcpy(taken, tier->taken, (size_t)tier->count * sizeof *taken);
  sluice_free(tier->allocator, tier->taken, (uint64_t)tier->capacity * sizeof *taken);
  tier->taken = taken, tier->capacity = capacity;
  return SLUICE_OK;
}

/* Takes the first gap that is large enough, so that the file stays small. */
static sluice_status_t take_of_file(tier_t* tier, place_t* place) {
  SLUICE_TRY(make_room(tier));
  int32_t index = 0;
  for (; index < tier->count; ++index) {
    const place_t* next = tier->taken + index;
    if (next->at - place->at >= place->bytes) break;
    place->at = next->at + whole_pages(next->bytes);
  }
  memmove(tier->taken + index + 1, tier->taken + index, (size_t)(tier->count - index) * sizeof *tier->taken);
  tier->taken[index] = *place;
  ++tier->count;
  return SLUICE_OK;
}

/* Errors: OVER_BUDGET, NO_MEMORY. */
static sluice_status_t tier_take(tier_t* tier, uint64_t bytes, place_t* out_place) {
  if (bytes > tier->budget - tier->used) {
    return SLUICE_FAIL(SLUICE_E_OVER_BUDGET,
                       "swap: %llu bytes would be copied out in addition to %llu, more than the budget of %llu: give a "
                       "larger budget, or swap fewer layers",
                       (unsigned long long)bytes, (unsigned long long)tier->used, (unsigned long long)tier->budget);
  }
  place_t place = {.bytes = bytes};
  uint64_t counted = 0;
  SLUICE_TRY(tier->is_file ? take_of_file(tier, &place)
                           : sluice_pool_take(&tier->pool, bytes, "swap: host memory", &place.memory, &counted));
  tier->used += bytes;
  *out_place = place;
  return SLUICE_OK;
}

static void tier_give(tier_t* tier, const place_t* place) {
  tier->used -= place->bytes;
  if (!tier->is_file) {
    (void)sluice_pool_give(&tier->pool, place->memory);
    return;
  }
  int32_t index = 0;
  while (tier->taken[index].at != place->at) ++index;
  --tier->count;
  memmove(tier->taken + index, tier->taken + index + 1, (size_t)(tier->count - index) * sizeof *tier->taken);
}

/* Write and read a part of a piece, from byte `from` on. Any thread. Errors: EXTERNAL. */
static sluice_status_t tier_write(const tier_t* tier, const place_t* place, uint64_t from, const void* data,
                                  uint64_t bytes) {
  if (tier->is_file)
    return sluice_file_write_at(tier->descriptor.fd, "swap", tier->path, place->at + from, data, bytes);
  memcpy((char*)place->memory + from, data, bytes);
  return SLUICE_OK;
}

static sluice_status_t tier_read(const tier_t* tier, const place_t* place, uint64_t from, void* to, uint64_t bytes) {
  if (tier->is_file) return sluice_file_read_at(tier->descriptor.fd, "swap", tier->path, place->at + from, to, bytes);
  memcpy(to, (const char*)place->memory + from, bytes);
  return SLUICE_OK;
}

/* ---- pieces ---- */

/* Copies are made in parts of this size, so that a dropped copy ends soon. */
#define PART (UINT64_C(1) << 20)

typedef enum { LEAVES, IS_OUT, COMES, IS_BACK } state_t;

typedef struct piece_s {
  int64_t ticket;
  state_t state;
  const void* data; /* source of the copy out */
  void* to;         /* destination of the copy back */
  place_t place;
  int32_t is_dropped;
  struct piece_s* next;     /* in the list of all pieces */
  struct piece_s* next_job; /* in the queue of copies */
} piece_t;

struct sluice_swap_s {
  sluice_swap_order_t order;
  tier_t tier;
  double bytes_per_second;
  pid_t pid;
  pthread_t thread;
  int64_t last_ticket;
  /* The host's thread and the worker share the following members. */
  pthread_mutex_t mutex;
  pthread_cond_t has_work, has_ended;
  piece_t* pieces;
  piece_t *first_job, *last_job;
  piece_t* runs; /* the piece that is being copied */
  int32_t num_leaving;
  int32_t is_over;
  int32_t has_failed;
  sluice_error_info_t failure;
  uint64_t link_is_free_ns;
  sluice_swap_stats_t stats;
};

/* ---- the worker ---- */

/* Waits until a link with the configured rate would have sent the bytes. Call with the mutex held; waits release it. */
static void hold_rate(sluice_swap_t* s, const piece_t* piece, uint64_t begun_ns, uint64_t bytes) {
  if (s->bytes_per_second <= 0) return;
  const uint64_t least = (uint64_t)((double)bytes / s->bytes_per_second * 1e9);
  s->link_is_free_ns = sluice_max(s->link_is_free_ns, begun_ns) + least;
  while (!piece->is_dropped && !s->is_over && sluice_now_ns() < s->link_is_free_ns)
    (void)sluice_cond_wait_until(&s->has_work, &s->mutex, s->link_is_free_ns);
}

/* Call with the mutex held; it is released while bytes are copied. */
static sluice_status_t copy(sluice_swap_t* s, const piece_t* piece) {
  sluice_status_t status = SLUICE_OK;
  for (uint64_t from = 0; from < piece->place.bytes && status == SLUICE_OK && !piece->is_dropped; from += PART) {
    const uint64_t begun = sluice_now_ns(), bytes = sluice_min(PART, piece->place.bytes - from);
    pthread_mutex_unlock(&s->mutex);
    status = piece->state == LEAVES ? tier_write(&s->tier, &piece->place, from, (const char*)piece->data + from, bytes)
                                    : tier_read(&s->tier, &piece->place, from, (char*)piece->to + from, bytes);
    pthread_mutex_lock(&s->mutex);
    if (status == SLUICE_OK) hold_rate(s, piece, begun, bytes);
    s->stats.copy_ns += sluice_now_ns() - begun;
  }
  return status;
}

static void run_job(sluice_swap_t* s) {
  piece_t* piece = s->runs = s->first_job;
  s->first_job = piece->next_job;
  if (s->first_job == NULL) s->last_job = NULL;
  piece->next_job = NULL;
  if (!s->has_failed && copy(s, piece) != SLUICE_OK) {
    s->has_failed = 1;
    sluice_error_capture(&s->failure);
  }
  if (piece->state == LEAVES) {
    piece->state = IS_OUT;
    --s->num_leaving;
    if (!s->has_failed) s->stats.out_bytes += piece->place.bytes;
  } else {
    piece->state = IS_BACK;
    if (!s->has_failed) s->stats.in_bytes += piece->place.bytes;
  }
  s->runs = NULL;
  pthread_cond_broadcast(&s->has_ended);
}

static void* work(void* data) {
  sluice_swap_t* s = data;
  pthread_mutex_lock(&s->mutex);
  while (!s->is_over) {
    if (s->first_job != NULL) {
      run_job(s);
    } else {
      pthread_cond_wait(&s->has_work, &s->mutex);
    }
  }
  pthread_mutex_unlock(&s->mutex);
  return NULL;
}

/* Call with the mutex held. */
static void add_job(sluice_swap_t* s, piece_t* piece) {
  *(s->last_job != NULL ? &s->last_job->next_job : &s->first_job) = piece;
  s->last_job = piece;
  pthread_cond_signal(&s->has_work);
}

/* ---- pieces ---- */

static piece_t* find(const sluice_swap_t* s, int64_t ticket) {
  piece_t* piece = s->pieces;
  while (piece != NULL && piece->ticket != ticket) piece = piece->next;
  return piece;
}

static sluice_status_t check_process(const sluice_swap_t* s) {
  if (s->pid == getpid()) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_STATE, "swap: it was made before fork() and is the parent's; the child may make another");
}

static sluice_status_t find_piece(const sluice_swap_t* s, int64_t ticket, piece_t** out_piece) {
  SLUICE_TRY(check_process(s));
  *out_piece = find(s, ticket);
  return SLUICE_REQUIRE(
      *out_piece != NULL,
      "swap: ticket %lld does not exist: it was taken or released, or never returned by sluice_swap_put",
      (long long)ticket);
}

/* Waits until the piece has left `state`, LEAVES or COMES, and counts the wait. */
static sluice_status_t wait_for(sluice_swap_t* s, const piece_t* piece, state_t state) {
  pthread_mutex_lock(&s->mutex);
  const uint64_t begun = sluice_now_ns();
  s->stats.num_waits += piece->state == state;
  const int waits = piece->state == state;
  while (piece->state == state) pthread_cond_wait(&s->has_ended, &s->mutex);
  if (waits) s->stats.wait_ns += sluice_now_ns() - begun;
  const int32_t has_failed = s->has_failed;
  pthread_mutex_unlock(&s->mutex);
  return has_failed ? sluice_error_adopt(&s->failure) : SLUICE_OK;
}

/* Frees a piece that is not being copied. */
static void forget(sluice_swap_t* s, piece_t* piece) {
  piece_t** link = &s->pieces;
  while (*link != piece) link = &(*link)->next;
  *link = piece->next;
  s->stats.held_bytes -= piece->place.bytes;
  tier_give(&s->tier, &piece->place);
  sluice_free(sluice_process_allocator(), piece, sizeof *piece);
}

static void take_out_of_jobs(sluice_swap_t* s, const piece_t* piece) {
  piece_t *before = NULL, *job = s->first_job;
  while (job != NULL && job != piece) before = job, job = job->next_job;
  if (job == NULL) return;
  *(before != NULL ? &before->next_job : &s->first_job) = job->next_job;
  if (s->last_job == job) s->last_job = before;
  if (job->state == LEAVES) --s->num_leaving;
}

static void drop(sluice_swap_t* s, piece_t* piece) {
  pthread_mutex_lock(&s->mutex);
  take_out_of_jobs(s, piece);
  piece->is_dropped = 1;
  pthread_cond_signal(&s->has_work);
  while (s->runs == piece) pthread_cond_wait(&s->has_ended, &s->mutex);
  pthread_mutex_unlock(&s->mutex);
  forget(s, piece);
}

/* ---- calls ---- */

sluice_status_t sluice_swap_reach(sluice_swap_t* s, int32_t event, int64_t micro_batch, int32_t layer,
                                  sluice_swap_op_t* ops, int32_t room, int32_t* out_count) {
  SLUICE_TRY(SLUICE_REQUIRE(s != NULL && ops != NULL && out_count != NULL,
                            "sluice_swap_reach: swap, ops and out_count may not be NULL"));
  *out_count = 0;
  SLUICE_TRY(check_process(s));
  pthread_mutex_lock(&s->mutex);
  const int32_t has_left = s->num_leaving == 0;
  pthread_mutex_unlock(&s->mutex);
  return sluice_swap_order_reach(&s->order, event, micro_batch, layer, has_left, ops, room, out_count);
}

static int32_t has_failed(sluice_swap_t* s) {
  pthread_mutex_lock(&s->mutex);
  const int32_t failed = s->has_failed;
  pthread_mutex_unlock(&s->mutex);
  return failed;
}

sluice_status_t sluice_swap_put(sluice_swap_t* s, const void* data, uint64_t bytes, int64_t* out_ticket) {
  SLUICE_TRY(SLUICE_REQUIRE(s != NULL && data != NULL && out_ticket != NULL,
                            "sluice_swap_put: swap, data and out_ticket may not be NULL"));
  *out_ticket = 0;
  SLUICE_TRY(SLUICE_REQUIRE(bytes > 0, "sluice_swap_put: bytes is 0"));
  SLUICE_TRY(check_process(s));
  if (has_failed(s)) return sluice_error_adopt(&s->failure);
  piece_t* piece = sluice_alloc_zeroed(sluice_process_allocator(), sizeof *piece, "swap: a piece");
  if (piece == NULL) return sluice_alloc_status();
  const sluice_status_t status = tier_take(&s->tier, bytes, &piece->place);
  if (status != SLUICE_OK) {
    sluice_free(sluice_process_allocator(), piece, sizeof *piece);
    return status;
  }
  piece->data = data, piece->state = LEAVES, piece->next = s->pieces;
  *out_ticket = piece->ticket = ++s->last_ticket;
  s->pieces = piece;
  s->stats.held_bytes += bytes;
  s->stats.most_bytes = sluice_max(s->stats.most_bytes, s->stats.held_bytes);
  pthread_mutex_lock(&s->mutex);
  ++s->num_leaving;
  add_job(s, piece);
  pthread_mutex_unlock(&s->mutex);
  return SLUICE_OK;
}

sluice_status_t sluice_swap_settle(sluice_swap_t* s, int64_t ticket) {
  piece_t* piece;
  SLUICE_TRY(SLUICE_REQUIRE(s != NULL, "sluice_swap_settle: swap is NULL"));
  SLUICE_TRY(find_piece(s, ticket, &piece));
  return wait_for(s, piece, LEAVES);
}

sluice_status_t sluice_swap_prefetch(sluice_swap_t* s, int64_t ticket, void* to) {
  piece_t* piece;
  SLUICE_TRY(SLUICE_REQUIRE(s != NULL && to != NULL, "sluice_swap_prefetch: swap and to may not be NULL"));
  SLUICE_TRY(find_piece(s, ticket, &piece));
  SLUICE_TRY(wait_for(s, piece, LEAVES));
  pthread_mutex_lock(&s->mutex);
  const int is_out = piece->state == IS_OUT;
  if (is_out) {
    piece->state = COMES, piece->to = to;
    add_job(s, piece);
  }
  pthread_mutex_unlock(&s->mutex);
  if (is_out) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_STATE, "sluice_swap_prefetch: the copy back of ticket %lld has begun before",
                     (long long)ticket);
}

sluice_status_t sluice_swap_take(sluice_swap_t* s, int64_t ticket) {
  piece_t* piece;
  SLUICE_TRY(SLUICE_REQUIRE(s != NULL, "sluice_swap_take: swap is NULL"));
  SLUICE_TRY(find_piece(s, ticket, &piece));
  SLUICE_TRY(wait_for(s, piece, COMES));
  pthread_mutex_lock(&s->mutex);
  const int is_back = piece->state == IS_BACK;
  pthread_mutex_unlock(&s->mutex);
  if (!is_back) {
    return SLUICE_FAIL(SLUICE_E_STATE, "sluice_swap_take: ticket %lld was not fetched: call sluice_swap_prefetch first",
                       (long long)ticket);
  }
  forget(s, piece);
  return SLUICE_OK;
}

void sluice_swap_release(sluice_swap_t* s, int64_t ticket) {
  piece_t* piece = s != NULL && s->pid == getpid() ? find(s, ticket) : NULL;
  if (piece != NULL) drop(s, piece);
}

void sluice_swap_reset(sluice_swap_t* s) {
  if (s == NULL || s->pid != getpid()) return;
  while (s->pieces != NULL) drop(s, s->pieces);
  sluice_swap_order_reset(&s->order);
  s->has_failed = 0; /* without the mutex, because the worker is idle */
}

sluice_status_t sluice_swap_get_stats(sluice_swap_t* s, sluice_swap_stats_t* out_stats) {
  SLUICE_TRY(
      SLUICE_REQUIRE(s != NULL && out_stats != NULL, "sluice_swap_get_stats: swap and out_stats may not be NULL"));
  SLUICE_TRY(sluice_struct_check_size(out_stats, "sluice_swap_stats_t"));
  pthread_mutex_lock(&s->mutex);
  const sluice_swap_stats_t stats = s->stats;
  pthread_mutex_unlock(&s->mutex);
  sluice_struct_give(out_stats, &stats, sizeof stats);
  return SLUICE_OK;
}

/* ---- life ---- */

SLUICE_DEFINE_INIT(sluice_swap_config, 0)

static sluice_status_t check_config(const sluice_swap_config_t* c) {
  SLUICE_TRY(SLUICE_REQUIRE(c->num_layers >= 1 && c->num_layers <= 1 << 16 && c->swapped != NULL,
                            "sluice_swap_config_t: num_layers is %d; give 1 to 65536, and swapped for each of them",
                            c->num_layers));
  SLUICE_TRY(
      SLUICE_REQUIRE(c->budget_bytes > 0,
                     "sluice_swap_config_t: budget_bytes is 0; give the bytes that may be swapped out at one time"));
  SLUICE_TRY(SLUICE_REQUIRE(c->path == NULL || c->path[0] != 0,
                            "sluice_swap_config_t: path is empty; give one, or NULL "
                            "for host memory"));
  SLUICE_TRY(SLUICE_REQUIRE(c->bytes_per_second >= 0, "sluice_swap_config_t: bytes_per_second is %g; give a rate, or 0",
                            c->bytes_per_second));
  return SLUICE_REQUIRE(c->reserved == 0, "sluice_swap_config_t: reserved is %d; set it to 0", c->reserved);
}

static sluice_status_t start_worker(sluice_swap_t* s) {
  sigset_t all, before;
  sigfillset(&all); /* the host's signal handlers must run on its own threads */
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int error = pthread_create(&s->thread, NULL, work, s);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (error == 0) return SLUICE_OK;
  return SLUICE_FAIL(SLUICE_E_EXTERNAL, "swap: starting its thread: %s", strerror(error));
}

static void free_all(sluice_swap_t* s) {
  tier_close(&s->tier);
  sluice_swap_order_deinit(&s->order);
  pthread_cond_destroy(&s->has_work);
  pthread_cond_destroy(&s->has_ended);
  pthread_mutex_destroy(&s->mutex);
  sluice_free(sluice_process_allocator(), s, sizeof *s);
}

sluice_status_t sluice_swap_create(const sluice_swap_config_t* config, sluice_swap_t** out_swap) {
  SLUICE_TRY(SLUICE_REQUIRE(out_swap != NULL, "sluice_swap_create: out_swap is NULL"));
  *out_swap = NULL;
  SLUICE_READ_EXTENSIBLE(sluice_swap_config, c, config, sizeof c);
  SLUICE_TRY(check_config(&c));
  sluice_allocator_t* allocator = sluice_process_allocator();
  sluice_swap_t* s = sluice_alloc_zeroed(allocator, sizeof *s, "swap");
  if (s == NULL) return sluice_alloc_status();
  s->bytes_per_second = c.bytes_per_second;
  s->pid = getpid();
  sluice_status_t status = tier_open(&s->tier, c.path, c.budget_bytes, allocator);
  if (status != SLUICE_OK) {
    sluice_free(allocator, s, sizeof *s);
    return status;
  }
  pthread_mutex_init(&s->mutex, NULL);
  sluice_cond_init(&s->has_work);
  sluice_cond_init(&s->has_ended);
  status = sluice_swap_order_init(&s->order, c.swapped, c.num_layers, allocator);
  if (status == SLUICE_OK) status = start_worker(s);
  if (status == SLUICE_OK) {
    *out_swap = s;
  } else {
    free_all(s);
  }
  return status;
}

/* Does nothing in a forked child, in which the worker does not run and the mutex may be held for ever. */
void sluice_swap_destroy(sluice_swap_t* s) {
  if (s == NULL || s->pid != getpid()) return;
  sluice_swap_reset(s);
  pthread_mutex_lock(&s->mutex);
  s->is_over = 1;
  pthread_cond_signal(&s->has_work);
  pthread_mutex_unlock(&s->mutex);
  pthread_join(s->thread, NULL);
  free_all(s);
}
