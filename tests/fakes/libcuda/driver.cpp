/* CUDA's driver as far as slotcar_kernels.vmm asks it, with memory files in the place of a GPU's memory.
 *
 * It is as strict as the driver's documentation: sizes are multiples of the granularity, what is mapped can be used only
 * once access to it is set, and for reading only if that is what was set. FAKE_CUDA_GPUS has a letter for each GPU that
 * the process sees, in its order: the letter is all 16 bytes of the UUID. FAKE_CUDA_FAIL names calls that fail, each
 * "call=error", or "call:argument=error" for a call with this first number among its access flags or attributes.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <mutex>

namespace {

constexpr int INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101;
constexpr uint64_t GRANULARITY = 2 << 20, MOST_BYTES = 1 << 30;

struct Location {
    int type, id;
};
struct Properties {
    int type, handle_types;
    Location location;
    void *windows;
    unsigned char flags[8];
};
struct Access {
    Location location;
    int flags;
};
static_assert(sizeof(Properties) == 32 && sizeof(Access) == 12, "as in cuda.h");

struct Range {
    uint64_t size;
    bool is_mapped;
};

std::mutex lock;
std::map<uint64_t, int> handles; /* to memory files */
std::map<uint64_t, Range> ranges;
uint64_t next_handle = 1;
bool initialized = false;

const char *gpus() {
    const char *found = getenv("FAKE_CUDA_GPUS");
    return found ? found : "A";
}

int fault(const char *call, int argument = -1) {
    if (!initialized && strcmp(call, "cuInit")) return NOT_INITIALIZED;
    const char *faults = getenv("FAKE_CUDA_FAIL");
    char plain[96], with[96];
    snprintf(plain, sizeof plain, "%s=", call);
    snprintf(with, sizeof with, "%s:%d=", call, argument);
    for (const char *name : {plain, with})
        if (const char *at = faults ? strstr(faults, name) : nullptr) return atoi(at + strlen(name));
    return 0;
}

bool is_device(int device) { return device >= 0 && device < static_cast<int>(strlen(gpus())); }

uint64_t size_of(int file) {
    struct stat about;
    return fstat(file, &about) ? 0 : static_cast<uint64_t>(about.st_size);
}

uint64_t add(int file) {
    const std::lock_guard<std::mutex> held(lock);
    handles[next_handle] = file;
    return next_handle++;
}

}  // namespace

extern "C" {

int cuGetErrorName(int error, const char **text) {
    static thread_local char name[32];
    snprintf(name, sizeof name, "CUDA_ERROR_%d", error);
    *text = name;
    return 0;
}

int cuInit(unsigned) {
    if (const int found = fault("cuInit")) return found;
    initialized = true;
    return 0;
}

int cuDeviceGetCount(int *count) {
    if (const int found = fault("cuDeviceGetCount")) return found;
    *count = static_cast<int>(strlen(gpus()));
    return 0;
}

int cuDeviceGetUuid_v2(char *uuid, int device) {
    if (const int found = fault("cuDeviceGetUuid_v2")) return found;
    if (!is_device(device)) return INVALID_DEVICE;
    memset(uuid, gpus()[device], 16);
    return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (!is_device(device)) return INVALID_DEVICE;
    *value = !fault("cuDeviceGetAttribute", attribute);
    return 0;
}

int cuMemGetAllocationGranularity(size_t *granularity, const Properties *properties, int option) {
    if (const int found = fault("cuMemGetAllocationGranularity")) return found;
    if (option != 0 || properties->location.type != 1) return INVALID_VALUE;
    *granularity = GRANULARITY;
    return 0;
}

int cuMemCreate(uint64_t *handle, size_t size, const Properties *properties, unsigned long long flags) {
    if (const int found = fault("cuMemCreate")) return found;
    if (!size || size % GRANULARITY || flags || properties->type != 1 || properties->windows) return INVALID_VALUE;
    if (properties->handle_types != 1 || properties->location.type != 1) return INVALID_VALUE;
    if (!is_device(properties->location.id)) return INVALID_DEVICE;
    if (size > MOST_BYTES) return OUT_OF_MEMORY;
    const int file = memfd_create("fake-gpu", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, static_cast<off_t>(size))) return OUT_OF_MEMORY;
    *handle = add(file);
    return 0;
}

int cuMemExportToShareableHandle(int *descriptor, uint64_t handle, int type, unsigned long long flags) {
    if (const int found = fault("cuMemExportToShareableHandle")) return found;
    const std::lock_guard<std::mutex> held(lock);
    const auto at = handles.find(handle);
    if (at == handles.end() || type != 1 || flags) return INVALID_VALUE;
    *descriptor = fcntl(at->second, F_DUPFD_CLOEXEC, 0);
    return *descriptor < 0 ? OUT_OF_MEMORY : 0;
}

int cuMemImportFromShareableHandle(uint64_t *handle, void *descriptor, int type) {
    if (const int found = fault("cuMemImportFromShareableHandle")) return found;
    const int file = fcntl(static_cast<int>(reinterpret_cast<intptr_t>(descriptor)), F_DUPFD_CLOEXEC, 0);
    if (file < 0 || type != 1) return INVALID_VALUE;
    if (!size_of(file) || size_of(file) % GRANULARITY) {
        close(file);
        return INVALID_VALUE;
    }
    *handle = add(file);
    return 0;
}

int cuMemRelease(uint64_t handle) {
    if (const int found = fault("cuMemRelease")) return found;
    const std::lock_guard<std::mutex> held(lock);
    const auto at = handles.find(handle);
    if (at == handles.end()) return INVALID_VALUE;
    close(at->second);
    handles.erase(at);
    return 0;
}

int cuMemAddressReserve(uint64_t *address, size_t size, size_t, uint64_t, unsigned long long flags) {
    if (const int found = fault("cuMemAddressReserve")) return found;
    if (!size || size % GRANULARITY || flags) return INVALID_VALUE;
    void *found = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return OUT_OF_MEMORY;
    *address = reinterpret_cast<uint64_t>(found);
    const std::lock_guard<std::mutex> held(lock);
    ranges[*address] = {size, false};
    return 0;
}

int cuMemMap(uint64_t address, size_t size, size_t offset, uint64_t handle, unsigned long long flags) {
    if (const int found = fault("cuMemMap")) return found;
    const std::lock_guard<std::mutex> held(lock);
    const auto range = ranges.find(address);
    const auto file = handles.find(handle);
    if (range == ranges.end() || file == handles.end() || range->second.is_mapped || offset || flags)
        return INVALID_VALUE;
    if (size != range->second.size || size > size_of(file->second)) return INVALID_VALUE;
    void *at = reinterpret_cast<void *>(address);
    if (mmap(at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, file->second, 0) == MAP_FAILED) return OUT_OF_MEMORY;
    range->second.is_mapped = true;
    return 0;
}

int cuMemSetAccess(uint64_t address, size_t size, const Access *access, size_t count) {
    if (const int found = fault("cuMemSetAccess", access->flags)) return found;
    const std::lock_guard<std::mutex> held(lock);
    const auto range = ranges.find(address);
    if (range == ranges.end() || !range->second.is_mapped || size != range->second.size || count != 1)
        return INVALID_VALUE;
    if (access->location.type != 1 || !is_device(access->location.id)) return INVALID_DEVICE;
    if (access->flags != 1 && access->flags != 3) return INVALID_VALUE;
    const int protection = access->flags == 3 ? PROT_READ | PROT_WRITE : PROT_READ;
    return mprotect(reinterpret_cast<void *>(address), size, protection) ? INVALID_VALUE : 0;
}

int cuMemUnmap(uint64_t address, size_t size) {
    if (const int found = fault("cuMemUnmap")) return found;
    const std::lock_guard<std::mutex> held(lock);
    const auto range = ranges.find(address);
    if (range == ranges.end() || !range->second.is_mapped || size != range->second.size) return INVALID_VALUE;
    void *at = reinterpret_cast<void *>(address);
    mmap(at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    range->second.is_mapped = false;
    return 0;
}

int cuMemAddressFree(uint64_t address, size_t size) {
    if (const int found = fault("cuMemAddressFree")) return found;
    const std::lock_guard<std::mutex> held(lock);
    const auto range = ranges.find(address);
    if (range == ranges.end() || range->second.is_mapped || size != range->second.size) return INVALID_VALUE;
    munmap(reinterpret_cast<void *>(address), size);
    ranges.erase(range);
    return 0;
}

}  // extern "C"
