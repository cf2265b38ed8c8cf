// A test is a function whose name is a sentence. A failed check prints its place, the comparison and both values.
//
//   TEST(a_sentence_about_the_behaviour) { CHECK_EQ(found, expected); }
//
// The program runs the test named on its command line, or all tests. Each runs in a separate child process, so that it
// sees no memory of another test. CMakeLists.txt finds the names by the word TEST at the start of a line. A check
// throws, so catch it in a thread or child (as InChild does), or compare after joining.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <exception>
#include <functional>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

// Writes the counters of the lines that ran, because _exit does not. Only `make coverage` links coverage_dump.cpp.
extern "C" [[gnu::weak]] void torch_xla_donate_dump_coverage();

struct NamedTest {
  const char* name;
  void (*body)();
};

inline std::vector<NamedTest>& AllTests() {
  static std::vector<NamedTest> tests;
  return tests;
}

#define TEST(name)                                                                                    \
  static void name();                                                                                 \
  [[maybe_unused]] static const bool registered_##name = (AllTests().push_back({#name, name}), true); \
  static void name()

#define CHECK_EQ(found, expected) CheckEqual((found), (expected), #found " == " #expected, __FILE__, __LINE__)
#define CHECK(condition) CheckEqual(static_cast<bool>(condition), true, #condition, __FILE__, __LINE__)
#define CHECK_CONTAINS(text, part) CheckContains((text), (part), __FILE__, __LINE__)

template <typename Found, typename Expected>
void CheckEqual(const Found& found, const Expected& expected, const char* what, const char* file, int line) {
  if (found == expected) return;
  std::ostringstream text;
  text << file << ":" << line << ": " << what << "\n  found:    " << found << "\n  expected: " << expected;
  throw std::logic_error(text.str());
}

inline void CheckContains(const std::string& text, const std::string& part, const char* file, int line) {
  CheckEqual(text.find(part) != std::string::npos ? part : text, part, "the text contains the part", file, line);
}

// The message of the Error that `action` throws; "" if it throws none.
template <typename Error = std::runtime_error>
std::string MessageOf(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// Whether `body` succeeds in a forked child.
inline bool InChild(const std::function<void()>& body) {
  std::cout.flush();
  const pid_t child = fork();
  if (child == 0) {
    int code = 0;
    try {
      body();
    } catch (const std::exception& error) {
      std::cerr << error.what() << std::endl;
      code = 1;
    }
    if (torch_xla_donate_dump_coverage != nullptr) torch_xla_donate_dump_coverage();
    _exit(code);
  }
  int status = -1;
  if (child < 0 || waitpid(child, &status, 0) != child) throw std::runtime_error("cannot fork or wait for the child");
  if (WIFSIGNALED(status)) std::cerr << "killed by signal: " << strsignal(WTERMSIG(status)) << std::endl;
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

int main(int count, char** arguments) {
  int run = 0, failed = 0;
  for (const NamedTest& test : AllTests()) {
    if (count > 1 && std::strcmp(arguments[1], test.name) != 0) continue;
    const bool passed = InChild(test.body);
    std::cout << (passed ? "passed  " : "FAILED  ") << test.name << std::endl;
    ++run;
    failed += passed ? 0 : 1;
  }
  std::cout << run << " run, " << failed << " failed" << std::endl;
  return run > 0 && failed == 0 ? 0 : 1;
}
