// Exchanges slots atomically, with the protection of their pages, and restores them.
#include "elf/patch.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <linux/membarrier.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <system_error>

namespace torch_xla_donate {
namespace {

// Two patches may share a page. Without this lock one could write-protect it between the other's mprotect and store.
std::mutex g_pages;

// Returns the PROT_ bits of the page at `address`, or -1 with errno. Allocates nothing, because Undo() must not fail.
int ProtectionOf(const void* address) noexcept {
  const int file = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  if (file < 0) return -1;
  const auto wanted = reinterpret_cast<std::uintptr_t>(address);
  int found = -1;
  char chunk[4096];
  char line[64];  // only the beginning counts: "begin-end rwxp"
  std::size_t length = 0;
  ssize_t count;
  while (found < 0 && (count = read(file, chunk, sizeof chunk)) > 0) {
    for (const char* it = chunk; it != chunk + count && found < 0; ++it) {
      if (*it != '\n') {
        if (length < sizeof line - 1) line[length++] = *it;
        continue;
      }
      line[length] = '\0';
      length = 0;
      unsigned long begin = 0, end = 0;
      char flags[5] = "";
      // NOLINTNEXTLINE(bugprone-unchecked-string-to-number-conversion): the kernel writes the line
      if (std::sscanf(line, "%lx-%lx %4s", &begin, &end, flags) == 3 && begin <= wanted && wanted < end) {
        found =
            (flags[0] == 'r' ? PROT_READ : 0) | (flags[1] == 'w' ? PROT_WRITE : 0) | (flags[2] == 'x' ? PROT_EXEC : 0);
      }
    }
  }
  close(file);
  if (found < 0) errno = EFAULT;
  return found;
}

// Stores `wanted` if the slot holds `held`, and sets `held` to the slot's old value. Returns 0 or an errno.
// `protection` is used if the protection of the page cannot be read (-1 if unknown), and otherwise receives it.
int ExchangeSlot(void** slot, void*& held, void* wanted, int& protection) noexcept {
  const int now = ProtectionOf(static_cast<const void*>(slot));
  if (now < 0 && protection < 0) return errno;
  if (now >= 0) protection = now;
  const auto size = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  void* const page = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(slot) & ~(size - 1));
  const bool read_only = (protection & PROT_WRITE) == 0;
  if (read_only && mprotect(page, size, protection | PROT_WRITE) != 0) return errno;
  __atomic_compare_exchange_n(slot, &held, wanted, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return read_only && mprotect(page, size, protection) != 0 ? errno : 0;
}

// A caller loads the slot without a barrier. On a weakly ordered machine it could see the replacement but read the old
// `*original`. No store here prevents that, only a barrier in every running thread.
void FenceAllThreads() noexcept {
#if defined(__aarch64__)
  syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0);
  syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0);
#endif
}

void* Load(void* const* slot) noexcept { return __atomic_load_n(slot, __ATOMIC_SEQ_CST); }

// "0x7f00 (name in /path/library.so)"
std::string Describe(const void* address) {
  std::ostringstream text;
  text << address;
  Dl_info info;
  if (address != nullptr && dladdr(address, &info) != 0) {
    text << " (" << (info.dli_sname != nullptr ? info.dli_sname : "an unnamed function") << " in "
         << (info.dli_fname != nullptr ? info.dli_fname : "an unnamed file") << ")";
  }
  return text.str();
}

std::string Where(const ElfImage& image, const PatchSpec& spec, const RelocationSlot& slot) {
  std::ostringstream text;
  text << "the " << Name(slot.kind) << " at " << static_cast<const void*>(slot.address) << " of \"" << spec.symbol
       << "\" in \"" << image.Path() << "\"";
  return text.str();
}

bool Holds(const ElfImage& image, const RelocationSlot& slot, const void* value, const void* expected) noexcept {
  // A bound slot holds `expected`, so another address inside the image can only be the PLT's.
  return value == expected || (slot.kind == RelocationKind::kJumpSlot && image.Contains(value));
}

void RequireExpected(const ElfImage& image, const PatchSpec& spec, const RelocationSlot& slot, const void* value) {
  if (Holds(image, slot, value, spec.expected)) return;
  throw std::runtime_error(Where(image, spec, slot) + " holds " + Describe(value) + ", expected " +
                           Describe(spec.expected) +
                           "; probably another tool has patched it: run without that tool, or start it later");
}

}  // namespace

// Delegates, so that an exception in the body runs the destructor, which undoes the patch.
GotPatch::GotPatch(const ElfImage& image, const PatchSpec& spec, const std::vector<RelocationSlot>& slots)
    : GotPatch() {
  if (spec.expected == nullptr || spec.replacement == nullptr || spec.original == nullptr) {
    throw std::invalid_argument("the patch of \"" + spec.symbol +
                                "\" lacks its expected function, its replacement or the place for the original; "
                                "expected three pointers: check that the function was found");
  }
  if (slots.empty()) {
    throw std::runtime_error("found no slot of \"" + spec.symbol + "\" in \"" + image.Path() +
                             "\", expected at least one; this build of the library does not import the function: "
                             "check that its version is a supported one");
  }
  try {
    Install(image, spec, slots);
  } catch (const std::runtime_error& error) {
    const std::size_t left = Undo();
    if (left == 0) throw;
    throw std::runtime_error(std::string(error.what()) + "; and " + std::to_string(left) +
                             " slots already replaced could not be put back: restart the process");
  }
}

void GotPatch::Install(const ElfImage& image, const PatchSpec& spec, const std::vector<RelocationSlot>& slots) {
  expected_ = spec.expected;
  replacement_ = spec.replacement;
  slots_.reserve(slots.size());  // the last allocation before a slot changes

  const std::lock_guard<std::mutex> lock(g_pages);
  for (const RelocationSlot& slot : slots) {
    if (reinterpret_cast<std::uintptr_t>(slot.address) % sizeof(void*) != 0) {
      throw std::runtime_error(Where(image, spec, slot) + " is not aligned to " + std::to_string(sizeof(void*)) +
                               " bytes as expected; it cannot be replaced while other threads use it");
    }
    RequireExpected(image, spec, slot, Load(slot.address));
  }

  spec.original->store(spec.expected);
  FenceAllThreads();
  for (const RelocationSlot& slot : slots) {
    PatchedSlot& patched = slots_.emplace_back(PatchedSlot{slot.address, nullptr, -1, true});
    while (patched.settled) {  // repeats only if another thread's first call binds the slot meanwhile
      patched.before = Load(slot.address);
      RequireExpected(image, spec, slot, patched.before);
      void* held = patched.before;
      const int error = ExchangeSlot(slot.address, held, replacement_, patched.protection);
      patched.settled = held != patched.before;
      if (error != 0) {
        throw std::runtime_error("cannot replace " + Where(image, spec, slot) +
                                 ": changing its page's protection gave \"" + std::generic_category().message(error) +
                                 "\", expected a page that can be made writable for a moment; look for a sandbox or "
                                 "a security policy that forbids it");
      }
    }
  }
}

GotPatch::~GotPatch() { static_cast<void>(Undo()); }

std::size_t GotPatch::Undo() noexcept {
  const std::lock_guard<std::mutex> lock(g_pages);
  std::size_t left = 0;
  for (PatchedSlot& slot : slots_) {
    if (slot.settled) continue;
    void* held = replacement_;
    if (Load(slot.address) == replacement_) {
      ExchangeSlot(slot.address, held, slot.before, slot.protection);  // the check below decides
    }
    const void* const now = Load(slot.address);
    // The dynamic linker may have bound a lazy slot over the replacement, or just after it was restored.
    slot.settled = now == slot.before || now == expected_;
    if (!slot.settled) ++left;
  }
  return left;
}

std::size_t GotPatch::InPlace() const noexcept {
  std::size_t count = 0;
  for (const PatchedSlot& slot : slots_) {
    if (Load(slot.address) == replacement_) ++count;
  }
  return count;
}

std::vector<GotPatch> InstallAll(const ElfImage& image, const std::vector<PatchSpec>& specs) {
  std::vector<std::string> symbols;
  for (const PatchSpec& spec : specs) symbols.push_back(spec.symbol);
  const auto slots = image.SlotsOfEach(symbols);
  std::vector<GotPatch> patches;
  patches.reserve(specs.size());
  for (const PatchSpec& spec : specs) patches.emplace_back(image, spec, slots.at(spec.symbol));
  return patches;
}

}  // namespace torch_xla_donate
