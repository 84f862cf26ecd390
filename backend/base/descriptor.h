// SPDX-License-Identifier: Apache-2.0
/* A descriptor of a file that forked children close. A lock of a file lasts until the last descriptor of it is closed,
 * whichever process holds it: a worker that was forked would keep it for its parent, which may have ended long ago.
 */
#ifndef SLUICE_BACKEND_BASE_DESCRIPTOR_H_
#define SLUICE_BACKEND_BASE_DESCRIPTOR_H_

/* Where it lies it stays, from open to close. */
typedef struct sluice_descriptor_s {
  int fd; /* -1: not open, or inherited: the parent's */
  struct sluice_descriptor_s *next, *previous;
} sluice_descriptor_t;

/* As open(), closed on exec. -1 with errno: then nothing is held. Thread-safe. */
int sluice_descriptor_open(sluice_descriptor_t* descriptor, const char* path, int flags);
/* Gives its lock up first, for children that have not closed theirs yet. Accepts one that is not open. Thread-safe. */
void sluice_descriptor_close(sluice_descriptor_t* descriptor);

#endif /* SLUICE_BACKEND_BASE_DESCRIPTOR_H_ */
