/* Files that the library reads back or loads: whose they are, and who else can change them. */
#ifndef SLUICE_BACKEND_BASE_OWNED_H_
#define SLUICE_BACKEND_BASE_OWNED_H_

/* A descriptor for reading a regular file, which the caller closes; -1 where there is none. must_be_ours: one that
 * others than this user and root can change, or a symbolic link, is -1 too, which is logged (WARN) with what to do.
 * Else the file is the user's choice, and a word is logged where others can write it. Thread-safe. */
int sluice_owned_open(const char* path, int must_be_ours);

/* Logs (WARN) that others can write a library that the user named by its path. Nothing where there is none. */
void sluice_owned_warn(const char* path);

#endif /* SLUICE_BACKEND_BASE_OWNED_H_ */
