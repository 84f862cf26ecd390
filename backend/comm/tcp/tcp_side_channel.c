// SPDX-License-Identifier: Apache-2.0
#include "backend/comm/tcp/tcp_side_channel.h"

#include "backend/comm/tcp/tcp_messages.h"

sluice_status_t sluice_tcp_open_side_channel(sluice_comm_t* comm, sluice_messages_t* messages,
                                             sluice_wire_t** out_wire) {
  const sluice_tcp_way_t way = {.connect_timeout_ns = SLUICE_TCP_CONNECT_NS};
  return sluice_tcp_messages_open(comm, &way, messages, out_wire);
}
