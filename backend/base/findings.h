/* Small files of the cache folder: what was found out about this machine, for the processes that come later.
 *
 * A file holds its form and a key, one line each, and then a text. So another version's, another machine's or a damaged
 * one is told from ours. Files are written beside and renamed into place: readers and writers of other processes never
 * see half of one. */
#ifndef SLUICE_BACKEND_BASE_FINDINGS_H_
#define SLUICE_BACKEND_BASE_FINDINGS_H_

#include <stddef.h>

#define SLUICE_FINDING_PATH_BYTES 1024

/* "FOLDER/NAME-<hash of the key>.json". folder NULL: SLUICE_CACHE_DIR, else XDG_CACHE_HOME/sluice, else
 * HOME/.cache/sluice. 0 where there is none, or the path is too long. */
int sluice_finding_path(const char* folder, const char* name, const char* key,
                        char out_path[SLUICE_FINDING_PATH_BYTES]);

/* 1: that path is what everybody has by default: only this user's files, and root's, are read there. */
int sluice_finding_is_default(const char* folder);

/* The text behind form and key, terminated, of *out_length bytes; in memory that the caller frees as *out_memory. NULL:
 * there is none, and *out_reason is NULL too; or it cannot be used, and *out_reason says why. At most 256 KiB.
 * must_be_ours: nobody else but root may be able to change it (owned.h). */
const char* sluice_finding_read(const char* path, const char* form, const char* key, int must_be_ours,
                                char** out_memory, size_t* out_length, const char** out_reason);

/* Makes the folder, for this user alone. 1: written, and on the disk before it has its name. 0: errno says why. */
int sluice_finding_write(const char* path, const char* form, const char* key, const char* text);

/* The processor as /proc/cpuinfo names it, "unknown processor" where it does not. */
void sluice_finding_processor(char* out, size_t room);

#endif /* SLUICE_BACKEND_BASE_FINDINGS_H_ */
