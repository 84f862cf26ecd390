// SPDX-License-Identifier: Apache-2.0
#include "backend/comm/nccl/fake/fake_nccl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backend/comm/nccl/fake/fake_nccl_files.h"
#include "backend/device/cuda/fake/fake_cuda.h"
#include "backend/device/cuda/fake/fake_record.h"

#define UNLIKE_SIDES "one side of a message is registered, the other is not"

enum { MAX_RANKS = 8, MAX_OPS = 1024, CUDA_ERROR = 1, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };

typedef struct message_s {
  struct message_s* next;
  char* data;
  size_t bytes;
  int done, is_registered;
} message_t;

typedef struct group_s {
  struct group_s* next;
  uint64_t id;
  int num_ranks, references;
  struct fake_comm_s* comms[MAX_RANKS];
  int gone[MAX_RANKS];                    /* aborted or destroyed */
  int is_own[MAX_RANKS];                  /* joined in this process */
  int64_t sent[MAX_RANKS];                /* messages to ranks of other processes */
  int64_t got[MAX_RANKS];                 /* and from them */
  message_t* sends[MAX_RANKS][MAX_RANKS]; /* [from][to], waiting for the other side, oldest first */
  message_t* recvs[MAX_RANKS][MAX_RANKS];
} group_t;

/* A split whose caller was told that it is in progress. */
typedef struct split_s {
  group_t* group; /* the new group */
  int rank, looks;
  void** out;
} split_t;

typedef struct fake_comm_s {
  group_t* group;
  int rank, references, ended;
  split_t* split;             /* in progress: this communicator accepts no other call */
  struct batch_s* late;       /* a group that enters its stream only ... */
  int looks;                  /* ... after this many queries */
  int64_t issued, finished;   /* groups: NCCL runs those of one communicator in the order of calls, on any stream */
  int outstanding[MAX_RANKS]; /* messages to or from that rank */
} fake_comm_t;

/* One group of calls on one stream. */
typedef struct batch_s {
  fake_comm_t* comm;
  void* stream;
  int num_messages, posted;
  int64_t number;
  int peers[MAX_OPS], is_send[MAX_OPS];
  message_t messages[MAX_OPS];
} batch_t;

typedef struct registration_s {
  struct registration_s* next;
  const fake_comm_t* comm;
  const char* data;
  size_t bytes;
} registration_t;

static struct {
  int64_t calls, fail_at, live, groups, num_broken, num_registered;
  int max_ctas, linger;
  char broken[128]; /* the first broken rule */
  registration_t* registrations;
  int fail_code, failed, version;
  uint64_t next_id;
  group_t* all;
} state = {.fail_at = -1, .version = 22809, .next_id = 1};
static _Thread_local int open_groups;
static _Thread_local batch_t* batch;
static void drop_batch(void* user);
static void enqueue_batch(batch_t* b);

void sluice_fake_nccl_set_version(int version) { state.version = version; }
void sluice_fake_nccl_fail_call(int64_t nth, int code) {
  sluice_fake_cuda_lock();
  state.calls = 0;
  state.fail_at = nth;
  state.fail_code = code;
  state.failed = 0;
  sluice_fake_cuda_unlock();
}
int sluice_fake_nccl_failed(void) { return state.failed; }
void sluice_fake_nccl_linger(int looks) { state.linger = looks; }
int64_t sluice_fake_nccl_live(void) { return state.live; }
int sluice_fake_nccl_max_ctas(void) { return state.max_ctas; }
int64_t sluice_fake_nccl_groups(void) { return state.groups; }
int64_t sluice_fake_nccl_registered(void) { return state.num_registered; }
int64_t sluice_fake_nccl_registrations(void) {
  int64_t count = 0;
  sluice_fake_cuda_lock();
  for (const registration_t* r = state.registrations; r != NULL; r = r->next) ++count;
  sluice_fake_cuda_unlock();
  return count;
}
int64_t sluice_fake_nccl_broken_rules(char* out, size_t out_bytes) {
  snprintf(out, out_bytes, "%s", state.broken);
  return state.num_broken;
}
int sluice_fake_nccl_open_groups(void) { return open_groups; }

static int planned(void) {
  if (state.calls++ != state.fail_at) return 0;
  state.failed = 1;
  return state.fail_code;
}

/* If ranks are processes, no test can ask for broken rules, so they are printed and fatal. */
static void breaks(const char* rule) {
  if (sluice_fake_nccl_has_folder()) {
    fprintf(stderr, "fake nccl: %s\n", rule);
    abort();
  }
  if (state.num_broken++ == 0) snprintf(state.broken, sizeof state.broken, "%s", rule);
}

/* Checks a call of the user, except for queries, destroy and abort. */
static void check_is_free(const fake_comm_t* comm) {
  if (comm->late != NULL) breaks("a communicator was used while its group was in progress");
  if (comm->split != NULL) breaks("a communicator was used while its split was in progress");
}

/* ---- registered buffers ---------------------------------------------------------------------------------------- */

static int fake_mem_alloc(void** out_data, size_t bytes) {
  sluice_fake_cuda_lock();
  int code = planned();
  if (code == 0 && sluice_fake_cuda_allocate(bytes, out_data) != 0) code = CUDA_ERROR;
  sluice_fake_cuda_unlock();
  return code;
}
/* Frees the memory even if it reports an error. */
static int fake_mem_free(void* data) {
  sluice_fake_cuda_lock();
  int code = planned();
  for (const registration_t* r = state.registrations; r != NULL; r = r->next) {
    if (r->data == data) breaks("memory was freed that is still registered");
  }
  if (sluice_fake_cuda_free(data) != 0 && code == 0) code = CUDA_ERROR;
  sluice_fake_cuda_unlock();
  return code;
}
static int fake_register(void* comm, void* data, size_t bytes, void** out_handle) {
  sluice_fake_cuda_lock();
  int code = planned();
  if (code == 0 && ((fake_comm_t*)comm)->ended) code = INVALID_ARGUMENT;
  if (code == 0) {
    registration_t* r = malloc(sizeof *r);
    *r = (registration_t){state.registrations, comm, data, bytes};
    state.registrations = r;
    *out_handle = r;
  }
  sluice_fake_cuda_unlock();
  return code;
}
static void drop_registrations(const fake_comm_t* comm, const void* handle) {
  for (registration_t** at = &state.registrations; *at != NULL;) {
    registration_t* r = *at;
    if (r->comm != comm || (handle != NULL && r != handle)) {
      at = &r->next;
      continue;
    }
    *at = r->next;
    free(r);
  }
}
/* Ends the registration even if it reports an error. */
static int fake_deregister(void* comm, void* handle) {
  const fake_comm_t* c = comm;
  sluice_fake_cuda_lock();
  int code = planned();
  if (c->issued > c->finished) breaks("a registration ended while messages were under way");
  drop_registrations(c, handle);
  sluice_fake_cuda_unlock();
  return code;
}
static int is_registered(const fake_comm_t* comm, const void* data, size_t bytes) {
  const char* at = data;
  for (const registration_t* r = state.registrations; r != NULL; r = r->next) {
    if (r->comm == comm && at >= r->data && at + bytes <= r->data + r->bytes) return 1;
  }
  return 0;
}

/* ---- communicators --------------------------------------------------------------------------------------------- */

static void drop_group(group_t* group) {
  if (--group->references > 0) return;
  group_t** at = &state.all;
  while (*at != group) at = &(*at)->next;
  *at = group->next;
  free(group);
}

static void drop_comm(fake_comm_t* comm) {
  if (--comm->references > 0) return;
  drop_group(comm->group);
  free(comm);
}

static group_t* group_of(uint64_t id, int num_ranks) {
  for (group_t* g = state.all; g != NULL; g = g->next) {
    if (g->id == id) return g;
  }
  group_t* group = calloc(1, sizeof *group);
  group->id = id;
  group->num_ranks = num_ranks;
  group->next = state.all;
  state.all = group;
  return group;
}

static int join(fake_comm_t** out_comm, int num_ranks, uint64_t id, int rank) {
  if (num_ranks > MAX_RANKS || rank < 0 || rank >= num_ranks || id == 0) return INVALID_ARGUMENT;
  group_t* group = group_of(id, num_ranks);
  fake_comm_t* comm = calloc(1, sizeof *comm);
  *comm = (fake_comm_t){.group = group, .rank = rank, .references = 1};
  ++group->references;
  group->comms[rank] = comm;
  group->is_own[rank] = 1;
  ++state.live;
  if (sluice_fake_nccl_has_folder()) {
    sluice_fake_nccl_note(id, rank, SLUICE_FAKE_HERE);
    sluice_fake_cuda_look_again(); /* changes by other ranks wake nothing here */
  }
  *out_comm = comm;
  return SLUICE_NCCL_IN_PROGRESS;
}

static int fake_version(int* out_version) {
  *out_version = state.version;
  return 0;
}
static const char* fake_error_string(int error) {
  return error == SLUICE_NCCL_REMOTE_ERROR ? "remote process exited or there was a network error" : "error on command";
}
static const char* fake_last_error(void* comm) {
  (void)comm;
  return "";
}
static int fake_unique_id(sluice_nccl_id_t* out_id) {
  sluice_fake_cuda_lock();
  int code = planned();
  memset(out_id, 0, sizeof *out_id);
  /* Must differ from the ids of other processes that share the folder. */
  const uint64_t id = sluice_fake_nccl_has_folder() ? state.next_id | (uint64_t)getpid() << 32 : state.next_id;
  if (code == 0) memcpy(out_id->internal, &id, sizeof id);
  ++state.next_id;
  sluice_fake_cuda_unlock();
  return code;
}
static int check_config(const sluice_nccl_config_t* config) {
  int is_right = config->magic == SLUICE_NCCL_MAGIC && config->size == sizeof *config && config->blocking == 0;
  is_right &= config->version >= 21700 && config->minCTAs == SLUICE_NCCL_UNDEFINED; /* else maxCTAs is ignored */
  state.max_ctas = config->maxCTAs;
  return is_right ? 0 : INVALID_USAGE;
}
static int fake_init(void** out_comm, int num_ranks, sluice_nccl_id_t id, int rank, sluice_nccl_config_t* config) {
  uint64_t number;
  memcpy(&number, id.internal, sizeof number);
  sluice_fake_cuda_lock();
  int code = planned();
  if (code == 0) code = check_config(config);
  fake_comm_t* comm = NULL;
  if (code == 0) code = join(&comm, num_ranks, number, rank);
  if (comm != NULL) *out_comm = comm;
  sluice_fake_cuda_unlock();
  return code;
}
/* Ranks of other processes have written notes instead. */
static int has_come(const group_t* group, int rank) {
  if (group->comms[rank] != NULL || group->gone[rank]) return 1;
  return sluice_fake_nccl_has_folder() && sluice_fake_nccl_is_noted(group->id, rank, SLUICE_FAKE_HERE);
}
static int has_gone(const group_t* group, int rank) {
  if (group->is_own[rank] || !sluice_fake_nccl_has_folder()) return group->gone[rank];
  return sluice_fake_nccl_is_noted(group->id, rank, SLUICE_FAKE_GONE);
}
static int have_all_come(const group_t* group) {
  for (int r = 0; r < group->num_ranks; ++r) {
    if (!has_come(group, r)) return 0;
  }
  return 1;
}

/* Splits into groups named after parent and colour. Keys are ranks. The size of a colour must equal the number of ranks
 * that will come, which a test selects by splitting everything into one colour or into pairs. The handle does not exist
 * yet when this returns: see look_at_split. */
static int fake_split(void* parent, int color, int key, void** out_comm, sluice_nccl_config_t* config) {
  fake_comm_t *from = parent, *comm = NULL;
  int num_ranks = color == 0 ? from->group->num_ranks : 2;
  sluice_fake_cuda_lock();
  int code = planned();
  check_is_free(from);
  if (code == 0) code = check_config(config);
  if (code == 0) code = join(&comm, num_ranks, from->group->id * 1000003u + (uint64_t)color + 7, key);
  if (comm != NULL) {
    from->split = malloc(sizeof *from->split);
    *from->split = (split_t){.group = comm->group, .rank = key, .out = out_comm};
  }
  sluice_fake_cuda_unlock();
  return code;
}

static void end_split(fake_comm_t* from, void* made) {
  *from->split->out = made;
  free(from->split);
  from->split = NULL;
}

/* In progress until all ranks have called; the handle is set one query after success is reported. */
static int look_at_split(fake_comm_t* from) {
  split_t* split = from->split;
  if (split == NULL) return 0;
  if (!have_all_come(split->group)) return SLUICE_NCCL_IN_PROGRESS;
  if (split->looks++ > 0) end_split(from, split->group->comms[split->rank]);
  return 0;
}

static int look_at_group(fake_comm_t* comm) {
  if (--comm->looks > 0) return SLUICE_NCCL_IN_PROGRESS;
  enqueue_batch(comm->late);
  comm->late = NULL;
  return 0;
}

static int is_waiting_for_gone(const fake_comm_t* comm) {
  for (int r = 0; r < comm->group->num_ranks; ++r) {
    if (comm->outstanding[r] > 0 && has_gone(comm->group, r)) return 1;
  }
  return 0;
}
static int fake_async(void* handle, int* out_error) {
  fake_comm_t* comm = handle;
  sluice_fake_cuda_lock();
  int code = planned();
  sluice_fake_cuda_pump();
  *out_error = have_all_come(comm->group) ? 0 : SLUICE_NCCL_IN_PROGRESS;
  if (*out_error == 0 && code == 0) *out_error = look_at_split(comm);
  if (*out_error == 0 && code == 0 && comm->late != NULL) *out_error = look_at_group(comm);
  if (is_waiting_for_gone(comm)) *out_error = SLUICE_NCCL_REMOTE_ERROR;
  sluice_fake_cuda_unlock();
  return code;
}

static void end_comm(fake_comm_t* comm) {
  if (comm->ended) breaks("a communicator was ended twice");
  if (comm->ended) return;
  comm->ended = 1;
  if (comm->late != NULL) drop_batch(comm->late);
  comm->late = NULL;
  if (comm->split != NULL) { /* its own split, whose handle is still to come */
    fake_comm_t* made = comm->split->group->comms[comm->split->rank];
    end_split(comm, made);
    end_comm(made);
  }
  comm->group->gone[comm->rank] = 1; /* from now on, waits of other ranks for it fail */
  comm->group->comms[comm->rank] = NULL;
  if (sluice_fake_nccl_has_folder()) sluice_fake_nccl_note(comm->group->id, comm->rank, SLUICE_FAKE_GONE);
  --state.live;
  drop_registrations(comm, NULL);
  sluice_fake_cuda_pump(); /* its own operations end */
  drop_comm(comm);
}
static int fake_finalize(void* comm) {
  (void)comm;
  sluice_fake_cuda_lock();
  int code = planned();
  sluice_fake_cuda_unlock();
  return code;
}
static int fake_destroy(void* comm) {
  sluice_fake_cuda_lock();
  int code = planned();
  check_is_free(comm);
  for (const registration_t* r = state.registrations; r != NULL && sluice_nccl_is_taken(code); r = r->next) {
    if (r->comm == comm) breaks("a communicator was destroyed with a registration left");
  }
  if (sluice_nccl_is_taken(code)) end_comm(comm);
  sluice_fake_cuda_unlock();
  return code;
}
static int fake_abort(void* comm) {
  sluice_fake_cuda_lock();
  int code = planned();
  end_comm(comm);
  sluice_fake_cuda_unlock();
  return code;
}

/* ---- messages -------------------------------------------------------------------------------------------------- */

static void append(message_t** list, message_t* message) {
  message->next = NULL;
  while (*list != NULL) list = &(*list)->next;
  *list = message;
}
static void take_out(message_t** list, const message_t* message) {
  for (; *list != NULL; list = &(*list)->next) {
    if (*list != message) continue;
    *list = message->next;
    return;
  }
}

/* One of the two ranks is in another process: a send completes at once. */
static void match_by_file(group_t* group, int from, int to) {
  for (message_t* s = group->sends[from][to]; s != NULL; s = group->sends[from][to] = s->next) {
    const sluice_fake_letter_t letter = {group->id, from, to, group->sent[to]++, s->is_registered};
    sluice_fake_nccl_post(&letter, s->data, s->bytes);
    s->done = 1;
  }
  for (message_t* r = group->recvs[from][to]; r != NULL; r = group->recvs[from][to] = r->next) {
    sluice_fake_letter_t letter = {group->id, from, to, group->got[from], 0};
    if (!sluice_fake_nccl_collect(&letter, r->data, r->bytes)) return;
    ++group->got[from];
    if (letter.is_registered != r->is_registered) breaks(UNLIKE_SIDES);
    state.num_registered += letter.is_registered && r->is_registered;
    r->done = 1;
  }
}

static void match(group_t* group, int from, int to) {
  if (sluice_fake_nccl_has_folder() && !(group->is_own[from] && group->is_own[to])) {
    match_by_file(group, from, to);
    return;
  }
  for (;;) {
    message_t *s = group->sends[from][to], *r = group->recvs[from][to];
    if (s == NULL || r == NULL || s->bytes != r->bytes) return;
    if (sluice_fake_is_carried(s->bytes)) memcpy(r->data, s->data, s->bytes);
    if (s->is_registered != r->is_registered) breaks(UNLIKE_SIDES);
    state.num_registered += s->is_registered && r->is_registered;
    s->done = r->done = 1;
    group->sends[from][to] = s->next;
    group->recvs[from][to] = r->next;
  }
}

/* The operation is the first of its stream: it posts once, and completes when every message has been matched, or when
 * its communicator has ended. */
static int is_ready(void* user) {
  batch_t* b = user;
  group_t* group = b->comm->group;
  if (b->comm->ended) return 1;
  if (b->number > b->comm->finished) return 0;
  for (int i = 0; i < b->num_messages && !b->posted; ++i) {
    int from = b->is_send[i] ? b->comm->rank : b->peers[i], to = b->is_send[i] ? b->peers[i] : b->comm->rank;
    append(b->is_send[i] ? &group->sends[from][to] : &group->recvs[from][to], &b->messages[i]);
  }
  b->posted = 1;
  int left = 0;
  memset(b->comm->outstanding, 0, sizeof b->comm->outstanding);
  for (int i = 0; i < b->num_messages; ++i) {
    int from = b->is_send[i] ? b->comm->rank : b->peers[i], to = b->is_send[i] ? b->peers[i] : b->comm->rank;
    match(group, from, to);
    if (b->messages[i].done) continue;
    ++left;
    ++b->comm->outstanding[b->peers[i]];
  }
  return left == 0;
}

/* A group waits for the current group of its communicator, and for those of peers whose messages are missing. */
static int waits_for(const void* user, const void* other) {
  const batch_t *b = user, *o = other;
  if (b->comm->ended || o->comm->ended || o->comm->group != b->comm->group || o->number != o->comm->finished) return 0;
  if (!b->posted || o->comm == b->comm) return o->comm == b->comm && o->number < b->number;
  for (int i = 0; i < b->num_messages; ++i) {
    if (!b->messages[i].done && b->peers[i] == o->comm->rank) return 1;
  }
  return 0;
}

static void drop_batch(void* user) {
  batch_t* b = user;
  for (int i = 0; i < b->num_messages && b->posted; ++i) {
    int from = b->is_send[i] ? b->comm->rank : b->peers[i], to = b->is_send[i] ? b->peers[i] : b->comm->rank;
    take_out(b->is_send[i] ? &b->comm->group->sends[from][to] : &b->comm->group->recvs[from][to], &b->messages[i]);
  }
  if (b->number >= b->comm->finished) b->comm->finished = b->number + 1;
  drop_comm(b->comm);
  free(b);
}

/* Records bytes sent and received, by peer. */
static void record_batch(const batch_t* b) {
  sluice_fake_part_t parts[MAX_OPS];
  int64_t count = 0;
  for (int i = 0; i < b->num_messages; ++i) {
    int64_t at = 0;
    while (at < count && parts[at].of[0] != b->peers[i]) ++at;
    if (at == count) parts[count++] = (sluice_fake_part_t){{b->peers[i], 0, 0}};
    parts[at].of[b->is_send[i] ? 1 : 2] += (int64_t)b->messages[i].bytes;
  }
  (void)sluice_fake_note_event(&(sluice_fake_event_t){.kind = SLUICE_FAKE_MESSAGES,
                                                      .rank = sluice_fake_stream_rank(b->stream),
                                                      .stream = sluice_fake_stream_number(b->stream),
                                                      .comm = (int64_t)b->comm->group->id,
                                                      .number = b->number,
                                                      .units = b->num_messages,
                                                      .count = count},
                               parts);
}

/* Called when the batch is enqueued: takes its turn among the groups of its communicator. */
static void note_batch(void* user, const sluice_fake_moment_t* moment) {
  batch_t* b = user;
  ++state.groups;
  b->number = b->comm->issued++;
  record_batch(b);
  for (int i = 0; i < b->num_messages; ++i) {
    sluice_fake_cuda_note_at(moment, b->messages[i].data, b->messages[i].bytes, !b->is_send[i]);
  }
}

/* Copies a captured batch for the launch of a graph. The captured batch itself is never posted. */
static void* batch_again(const void* user) {
  batch_t* b = malloc(sizeof *b);
  memcpy(b, user, sizeof *b);
  ++b->comm->references;
  return b;
}

static int fake_group_start(void) {
  sluice_fake_cuda_lock();
  int code = planned();
  if (code == 0) ++open_groups;
  sluice_fake_cuda_unlock();
  return code;
}
/* The group ends even if it reports an error; its calls are then dropped. */
static void enqueue_batch(batch_t* b) {
  sluice_fake_cuda_enqueue(b->stream, &(sluice_fake_op_t){.name = "a group of NCCL",
                                                          .ready = is_ready,
                                                          .waits_for = waits_for,
                                                          .drop = drop_batch,
                                                          .user = b,
                                                          .note = note_batch,
                                                          .again = batch_again});
}

static int fake_group_end(void) {
  sluice_fake_cuda_lock();
  int code = planned();
  if (open_groups == 0) {
    code = INVALID_USAGE;
  } else if (--open_groups == 0 && batch != NULL) {
    batch->number = -1;
    if (!sluice_nccl_is_taken(code) || batch->comm->ended) {
      drop_batch(batch);
    } else if (state.linger > 0) {
      if (batch->comm->late != NULL) enqueue_batch(batch->comm->late);
      batch->comm->late = batch, batch->comm->looks = state.linger;
      code = SLUICE_NCCL_IN_PROGRESS;
    } else {
      enqueue_batch(batch);
    }
    batch = NULL;
  }
  sluice_fake_cuda_unlock();
  return code;
}

static int add(const void* data, size_t count, int type, int peer, fake_comm_t* comm, void* stream, int is_send) {
  sluice_fake_cuda_lock();
  int code = planned();
  int is_wrong = type != SLUICE_NCCL_UINT8 || peer < 0 || peer >= comm->group->num_ranks || count == 0 ||
                 open_groups == 0 || (batch != NULL && (batch->comm != comm || batch->stream != stream));
  if (code == 0 && is_wrong) code = INVALID_USAGE;
  check_is_free(comm);
  if (sluice_nccl_is_taken(code)) {
    if (batch == NULL) {
      batch = calloc(1, sizeof *batch);
      batch->comm = comm;
      batch->stream = stream;
      ++comm->references;
    }
    int i = batch->num_messages++;
    batch->peers[i] = peer;
    batch->is_send[i] = is_send;
    batch->messages[i] =
        (message_t){.data = (char*)(uintptr_t)data, .bytes = count, .is_registered = is_registered(comm, data, count)};
  }
  sluice_fake_cuda_unlock();
  return code;
}
static int fake_send(const void* data, size_t count, int type, int peer, void* comm, void* stream) {
  return add(data, count, type, peer, comm, stream, 1);
}
static int fake_recv(void* data, size_t count, int type, int peer, void* comm, void* stream) {
  return add(data, count, type, peer, comm, stream, 0);
}

sluice_nccl_symbols_t sluice_fake_nccl(void) {
  int has = state.version >= 21900;
  return (sluice_nccl_symbols_t){.ncclMemAlloc = has ? fake_mem_alloc : NULL,
                                 .ncclMemFree = has ? fake_mem_free : NULL,
                                 .ncclCommRegister = has ? fake_register : NULL,
                                 .ncclCommDeregister = has ? fake_deregister : NULL,
                                 .ncclGetVersion = fake_version,
                                 .ncclGetUniqueId = fake_unique_id,
                                 .ncclCommInitRankConfig = fake_init,
                                 .ncclCommSplit = fake_split,
                                 .ncclCommGetAsyncError = fake_async,
                                 .ncclCommFinalize = fake_finalize,
                                 .ncclCommDestroy = fake_destroy,
                                 .ncclCommAbort = fake_abort,
                                 .ncclGetErrorString = fake_error_string,
                                 .ncclGetLastError = fake_last_error,
                                 .ncclGroupStart = fake_group_start,
                                 .ncclGroupEnd = fake_group_end,
                                 .ncclSend = fake_send,
                                 .ncclRecv = fake_recv};
}
