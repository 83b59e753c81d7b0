// SPDX-License-Identifier: Apache-2.0
//
// The only process of the emulated machine besides the tests: runs them with the arguments that stand one
// per line in /arguments, prints their exit status and ends the emulator.
#include <stdio.h>
#include <string.h>
#include <sys/io.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char text[4096];

int main(void) {
  char* arguments[64] = {"/tests"};
  int count = 1, status = 0;
  FILE* file = fopen("/arguments", "r");
  if (file) text[fread(text, 1, sizeof text - 1, file)] = 0;
  for (char* line = strtok(text, "\n"); line && count < 63; line = strtok(NULL, "\n"))
    arguments[count++] = line;

  mkdir("/proc", 0755);
  mount("proc", "/proc", "proc", 0, NULL);
  const pid_t child = fork();
  if (child == 0) {
    execv(arguments[0], arguments);
    perror(arguments[0]);
    _exit(127);
  }
  waitpid(child, &status, 0);
  if (WIFSIGNALED(status))
    printf("\nemulated: killed by signal %d\n", WTERMSIG(status));
  else
    printf("\nemulated: exit status %d\n", WEXITSTATUS(status));
  fflush(stdout);
  sync();
  sleep(1);
  // Bochs ends when this word arrives at its own port.
  ioperm(0x8900, 1, 1);
  for (const char* c = "Shutdown"; *c; ++c) outb(*c, 0x8900);
  for (;;) pause();
}
