// SPDX-License-Identifier: Apache-2.0
/* Assertions that a call fails with a status and a message, or succeeds. */
#pragma once

#include "backend/base/test/last_error.h"
#include "third_party/bazel/test.h"

/* Fails the test unless the call returned `want` and, for an error, the record's text contains `text`. */
static inline void check_refusal(sluice_status_t got, sluice_status_t want, const char* text, const char* call,
                                 const char* file, int line) {
  const sluice_error_info_t* why = last_error();
  if (got != want || (want != SLUICE_OK && (why->status != want || strstr(why->message, text) == NULL))) {
    fail_msg("%s:%d: %s\n gave %s (record: %s: \"%s\")\n want %s, naming \"%s\"", file, line, call,
             sluice_status_name(got), sluice_status_name(why->status), why->message, sluice_status_name(want), text);
  }
}

#define REFUSED(call, status, text) check_refusal((call), (status), (text), #call, __FILE__, __LINE__)
#define WORKS(call)                 check_refusal((call), SLUICE_OK, "", #call, __FILE__, __LINE__)
#define BAD                         SLUICE_E_INVALID_ARGUMENT
