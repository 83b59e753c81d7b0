// SPDX-License-Identifier: Apache-2.0
#include "settings.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <thread>

#include "device.h"

namespace ptx {

bool watching = true;

static std::string variable(const char* name, const char* fallback = "") {
  const char* value = std::getenv((std::string("PTX_EMULATOR_") + name).c_str());
  return value && *value ? value : fallback;
}
[[noreturn]] static void bad_setting(const char* name, const std::string& got, const char* wanted) {
  std::fprintf(stderr, "ptx_emulator: PTX_EMULATOR_%s is \"%s\"; possible: %s\n", name, got.c_str(),
               wanted);
  std::exit(2);
}

// BUILD is read by build.py.
static const char* const kVariables[] = {"CHECKS",   "SEED",  "ASYNC",    "THREADS",
                                         "COUNT",    "TIMES", "ON_ERROR", "ARCH",
                                         "PATIENCE", "CACHE", "BUILD"};

// A misspelt name would leave a check switched on or off without a word.
static void refuse_unknown_variables() {
  const std::string prefix = "PTX_EMULATOR_";
  for (char** entry = environ; *entry; entry++) {
    const std::string text = *entry, name = text.substr(0, text.find('='));
    if (name.rfind(prefix, 0) != 0) continue;
    std::string known;
    bool found = false;
    for (const char* variable : kVariables) {
      found |= name == prefix + variable;
      known += std::string(known.empty() ? "" : ", ") + variable;
    }
    if (found) continue;
    std::fprintf(stderr, "ptx_emulator: %s is not a setting; after %s may stand: %s\n",
                 name.c_str(), prefix.c_str(), known.c_str());
    std::exit(2);
  }
}

static Settings read() {
  refuse_unknown_variables();
  Settings s;
  const std::string checks = variable("CHECKS", "all");
  if (checks != "all") {
    s.bounds = s.races = s.initialised = s.barriers = false;
    std::istringstream list(checks);
    for (std::string name; std::getline(list, name, ',');) {
      if (name == "bounds")
        s.bounds = true;
      else if (name == "races")
        s.races = true;
      else if (name == "initialised")
        s.initialised = true;
      else if (name == "barriers")
        s.barriers = true;
      else if (name != "none")
        bad_setting("CHECKS", checks, "all, none, or a list of bounds,races,initialised,barriers");
    }
  }
  const std::string seed = variable("SEED", "0");
  char* end = nullptr;
  s.seed = std::strtoull(seed.c_str(), &end, 0);
  if (*end) bad_setting("SEED", seed, "a number");
  const std::string landing = variable("ASYNC", s.seed >= 2 ? "mixed" : "late");
  if (landing == "early")
    s.landing = Settings::kEarly;
  else if (landing == "mixed")
    s.landing = Settings::kMixed;
  else if (landing != "late")
    bad_setting("ASYNC", landing, "late, early, mixed");
  s.threads = unsigned(std::atoi(variable("THREADS", "0").c_str()));
  if (!s.threads) s.threads = std::max(1u, std::thread::hardware_concurrency());
  s.count_file = variable("COUNT");
  s.count = !s.count_file.empty();
  if (s.count_file == "-") s.count_file.clear();
  s.patience = unsigned(std::atoi(variable("PATIENCE", "60").c_str()));
  s.times = variable("TIMES", "0") == "1";
  const std::string on_error = variable("ON_ERROR", "exit");
  if (on_error != "exit" && on_error != "return") bad_setting("ON_ERROR", on_error, "exit, return");
  s.return_errors = on_error == "return";
  s.arch = std::atoi(variable("ARCH", "0").c_str());
  // The library lies in <build>/; the translator's place and the stamp of its sources are fixed
  // when it is built.
  Dl_info self;
  dladdr(reinterpret_cast<void*>(&read_settings), &self);
  char* real = realpath(self.dli_fname, nullptr);
  std::string folder = real;
  std::free(real);
  folder.resize(folder.rfind('/'));
  s.cache = variable("CACHE", (folder + "/translated").c_str());
  s.translator = PTX_EMULATOR_SOURCE;
  s.toolchain = PTX_EMULATOR_TOOLCHAIN;
  return s;
}

Settings* the_settings = nullptr;

Settings& read_settings() {
  the_settings = new Settings(read());  // used until the last static destructor of the program
  return *the_settings;
}

void update_watching() {
  const Settings& s = settings();
  watching = s.bounds || s.races || s.initialised || s.count;
}

}  // namespace ptx
