#include "backend/comm/tcp/tcp_beside.h"

#include "backend/comm/tcp/tcp_connect.h"
#include "backend/comm/tcp/tcp_messages.h"

sluice_status_t sluice_tcp_messages_beside(sluice_comm_t* comm, sluice_messages_t* messages, sluice_wire_t** out_wire) {
  sluice_tcp_config_t config;
  sluice_tcp_config_init(&config, sizeof config);
  config.connect_timeout_ns = SLUICE_TCP_CONNECT_NS;
  return sluice_tcp_messages_open(comm, &config, messages, out_wire);
}
