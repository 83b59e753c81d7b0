// SPDX-License-Identifier: Apache-2.0
// What the environment says, read once. README.md lists the variables.
#pragma once
#include <cstdint>
#include <string>

namespace ptx {

struct Settings {
  bool bounds = true, races = true, initialised = true, barriers = true;  // PTX_EMULATOR_CHECKS
  uint64_t seed = 0;  // 0: in order, 1: in reverse, else random
  enum Landing { kLate, kEarly, kMixed } landing = kLate;  // PTX_EMULATOR_ASYNC
  unsigned threads = 0;                                    // OS threads that run blocks
  bool count = false;
  std::string count_file;      // JSON lines; empty: standard error
  unsigned patience = 60;      // seconds that a loop may wait for other blocks
  bool times = false;          // a line per launch on standard error
  bool return_errors = false;  // a finding fails the launch instead of the process
  int arch = 0;                // compute capability; 0: that of the newest PTX in the program
  std::string cache;           // folder of translations
  std::string translator;      // folder of build.py
  std::string toolchain;       // stamp of what decides a translation besides its PTX
};
extern Settings* the_settings;
Settings& read_settings();
inline Settings& settings() { return the_settings ? *the_settings : read_settings(); }
void update_watching();

}  // namespace ptx
