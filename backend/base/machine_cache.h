// SPDX-License-Identifier: Apache-2.0
/* Small files in the cache folder: measurements of this machine, for later processes.
 *
 * A file contains its form and a key, one line each, and then a text, so a file of another version or machine, or a
 * damaged one, is recognised. Files are written under a temporary name and renamed: other processes never see a partial
 * file. */
#pragma once

#include <stddef.h>

#define SLUICE_FINDING_PATH_BYTES 1024

/* Writes the path "FOLDER/NAME-<hash of the key>.json". folder NULL: SLUICE_CACHE_DIR, else XDG_CACHE_HOME/sluice, else
 * HOME/.cache/sluice. Returns 0 if there is none, or the path is too long. */
int sluice_machine_cache_path(const char* folder, const char* name, const char* key,
                              char out_path[SLUICE_FINDING_PATH_BYTES]);

/* Returns 1 if that path is the default one: only files of this user and of root are read there. */
int sluice_machine_cache_is_default(const char* folder);

/* Returns the text after form and key, terminated, of *out_length bytes; it is in memory that the caller frees as
 * *out_memory. Returns NULL if there is none, with *out_reason NULL; or if it cannot be used, with the reason. At most
 * 256 KiB. must_be_ours: only this user and root may be able to change it (file_trust.h). */
const char* sluice_machine_cache_read(const char* path, const char* form, const char* key, int must_be_ours,
                                      char** out_memory, size_t* out_length, const char** out_reason);

/* Creates the folder, with access for this user only. Returns 1 if the file was written, and synced before it got its
 * name; 0 with errno otherwise. */
int sluice_machine_cache_write(const char* path, const char* form, const char* key, const char* text);

/* Writes the processor's name in /proc/cpuinfo; "unknown processor" if it has none. */
void sluice_machine_cache_processor(char* out, size_t room);
