// SPDX-License-Identifier: Apache-2.0
/* Captures streams into graphs, and launches graphs. */
#include <assert.h>
#include <stdlib.h>

#include "backend/device/cuda/fake/fake_world.h"

static _Thread_local sluice_fake_graph_t* own_capture; /* by this thread */

static node_t* add_node(fake_stream_t* stream) {
  sluice_fake_graph_t* graph = stream->graph;
  node_t* node = calloc(1, sizeof *node);
  node->stream = stream->index;
  node->records = node->waits_for = -1;
  *graph->tail = node;
  graph->tail = &node->next;
  ++graph->clocks[stream->index].at[stream->index];
  return node;
}

int sluice_fake_spoils(const fake_stream_t* stream) {
  if (own_capture != NULL) own_capture->is_spoiled = 1;
  if (stream != NULL && stream->graph != NULL) stream->graph->is_spoiled = 1;
  if (sluice_fake_world.global_capture != NULL) sluice_fake_world.global_capture->is_spoiled = 1;
  return own_capture != NULL || (stream != NULL && stream->graph != NULL) || sluice_fake_world.global_capture != NULL;
}

void sluice_fake_capture_op(fake_stream_t* stream, const sluice_fake_op_t* op) {
  stream->graph->is_spoiled |= op->again == NULL;
  add_node(stream)->op = *op;
}

void sluice_fake_record_in_capture(fake_stream_t* stream, fake_event_t* event) {
  sluice_fake_graph_t* graph = stream->graph;
  node_t* node = add_node(stream);
  graph->marks = realloc(graph->marks, (size_t)(graph->num_marks + 1) * sizeof *graph->marks);
  assert(graph->marks != NULL);
  graph->marks[graph->num_marks] = graph->clocks[stream->index];
  sluice_fake_drop_ticket(event->last);
  event->last = NULL;
  event->graph_id = graph->id;
  event->mark = node->records = graph->num_marks++;
}

/* Returns the current capture with this number. */
static sluice_fake_graph_t* graph_of(int64_t id) {
  for (int i = 0; i < MAX_STREAMS; ++i) {
    sluice_fake_graph_t* graph = sluice_fake_world.streams[i].graph;
    if (sluice_fake_world.streams[i].live && graph != NULL && graph->id == id) return graph;
  }
  return NULL;
}

int sluice_fake_wait_in_capture(fake_stream_t* stream, const fake_event_t* event) {
  sluice_fake_graph_t* graph = event->graph_id != 0 ? graph_of(event->graph_id) : NULL;
  if (event->graph_id == 0 && event->last == NULL) return 0; /* never recorded */
  if (graph == NULL || (stream->graph != NULL && stream->graph != graph)) {
    if (stream->graph != NULL) stream->graph->is_spoiled = 1;
    return event->graph_id == 0 ? CAPTURE_ISOLATION : CAPTURED_EVENT;
  }
  stream->graph = graph;
  graph->is_member[stream->index] = 1;
  add_node(stream)->waits_for = event->mark;
  sluice_fake_merge(&graph->clocks[stream->index], &graph->marks[event->mark]);
  return 0;
}

void sluice_fake_cuda_begin_capture(void* handle) {
  sluice_fake_cuda_lock();
  fake_stream_t* stream = sluice_fake_stream_of(handle);
  sluice_fake_graph_t* graph = calloc(1, sizeof *graph);
  assert(graph != NULL && stream->graph == NULL && own_capture == NULL);
  graph->id = ++sluice_fake_world.num_graphs;
  graph->origin = stream->index;
  graph->tail = &graph->head;
  graph->is_member[stream->index] = 1;
  stream->graph = own_capture = graph;
  sluice_fake_cuda_unlock();
}

void sluice_fake_cuda_begin_global_capture(void* handle) {
  sluice_fake_cuda_begin_capture(handle);
  sluice_fake_cuda_lock();
  sluice_fake_world.global_capture = own_capture;
  sluice_fake_cuda_unlock();
}

static int judge(const sluice_fake_graph_t* graph) {
  for (int i = 0; i < MAX_STREAMS; ++i) {
    if (graph->is_member[i] && graph->clocks[graph->origin].at[i] < graph->clocks[i].at[i]) return CAPTURE_UNJOINED;
  }
  return graph->is_spoiled ? CAPTURE_INVALIDATED : 0;
}

int sluice_fake_cuda_end_capture(void* handle, sluice_fake_graph_t** out_graph) {
  sluice_fake_cuda_lock();
  sluice_fake_graph_t* graph = sluice_fake_stream_of(handle)->graph;
  assert(graph != NULL && graph == own_capture && graph->origin == sluice_fake_stream_of(handle)->index);
  own_capture = NULL;
  if (sluice_fake_world.global_capture == graph) sluice_fake_world.global_capture = NULL;
  for (int i = 0; i < MAX_STREAMS; ++i) {
    if (!graph->is_member[i]) continue;
    sluice_fake_world.streams[i].graph = NULL;
    graph->places[i] = sluice_fake_new_stream(sluice_fake_world.streams[i].ordinal, 1);
    assert(graph->places[i] != NULL);
  }
  int code = judge(graph);
  sluice_fake_cuda_unlock();
  *out_graph = code == 0 ? graph : NULL;
  if (code != 0) sluice_fake_cuda_destroy_graph(graph);
  return code;
}

void sluice_fake_cuda_launch_graph(sluice_fake_graph_t* graph, void* handle) {
  sluice_fake_cuda_lock();
  fake_stream_t* stream = sluice_fake_stream_of(handle);
  ticket_t** tickets = calloc((size_t)graph->num_marks + 1, sizeof *tickets);
  queued_t* entry = sluice_fake_push(stream);
  ticket_t* before = entry->records = sluice_fake_new_ticket(stream);
  for (int i = 0; i < MAX_STREAMS; ++i) {
    if (graph->is_member[i]) sluice_fake_wait_for_ticket(graph->places[i], before);
  }
  sluice_fake_drop_ticket(before);
  for (const node_t* node = graph->head; node != NULL; node = node->next) {
    fake_stream_t* place = graph->places[node->stream];
    if (node->waits_for >= 0) {
      sluice_fake_wait_for_ticket(place, tickets[node->waits_for]);
    } else if (node->records >= 0) {
      queued_t* item = sluice_fake_push(place);
      tickets[node->records] = item->records = sluice_fake_new_ticket(place);
    } else {
      sluice_fake_op_t op = node->op;
      op.user = op.again(op.user);
      sluice_fake_put(place, &op);
    }
  }
  queued_t* exit = sluice_fake_push(graph->places[graph->origin]);
  ticket_t* after = exit->records = sluice_fake_new_ticket(graph->places[graph->origin]);
  sluice_fake_wait_for_ticket(stream, after);
  sluice_fake_drop_ticket(after);
  for (int32_t i = 0; i < graph->num_marks; ++i) sluice_fake_drop_ticket(tickets[i]);
  free(tickets);
  sluice_fake_cuda_pump();
  sluice_fake_cuda_unlock();
}

void sluice_fake_cuda_destroy_graph(sluice_fake_graph_t* graph) {
  if (graph == NULL) return;
  sluice_fake_cuda_lock();
  sluice_fake_cuda_pump();
  for (node_t *node = graph->head, *next; node != NULL; node = next) {
    next = node->next;
    if (node->op.drop != NULL) node->op.drop(node->op.user);
    free(node);
  }
  for (int i = 0; i < MAX_STREAMS; ++i) {
    if (graph->places[i] != NULL) sluice_fake_end_stream(graph->places[i]);
  }
  free(graph->marks);
  free(graph);
  sluice_fake_cuda_unlock();
}
