/* A libnvidia-ml.so.1 that owns no card: it answers from a text file, so that the real Python bindings can be tested.
 *
 * FAKE_NVML names the file, which is read anew at every call and replaced as a whole by the tests:
 *
 *     init CODE                    what nvmlInit returns (0: success)
 *     boot N                       another number: the driver was reloaded, and wants nvmlInit again
 *     v2 0|1                       whether version 2 of the memory call exists
 *     lists 0|1                    whether processes are listed; in most containers they are not
 *     device KEY=VALUE ... name=TEXT TO THE END OF THE LINE
 *     instance KEY=VALUE ... name=...          a MIG instance of the device above it
 *
 * Keys: uuid; total, reserved, used (bytes); error (what the memory call returns); lookup (what finding the device
 * returns); mig (1: cut into instances).
 *
 * Beside it, FAKE_NVML.d/PID holds lines "UUID BYTES": what process PID occupies, for as long as it lives.
 */

#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, SHORT = 7, NO_FUNCTION = 13 };
enum { MOST = 64 };

typedef struct {
    int is_instance, parent; /* parent: position among the cards */
    char uuid[96], name[96];
    unsigned long long total, reserved, used;
    int error, lookup, mig;
} Device;

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } MemoryV2;
typedef struct { unsigned int pid; unsigned long long used; unsigned int instance, compute; } Process;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Device devices[MOST];
static int count, init_code, has_v2, lists, boot, users, users_boot;

static void set(Device *device, const char *key, const char *value) {
    if (!strcmp(key, "uuid")) snprintf(device->uuid, sizeof device->uuid, "%s", value);
    else if (!strcmp(key, "used")) device->used = strtoull(value, NULL, 10);
    else if (!strcmp(key, "total")) device->total = strtoull(value, NULL, 10);
    else if (!strcmp(key, "reserved")) device->reserved = strtoull(value, NULL, 10);
    else if (!strcmp(key, "error")) device->error = atoi(value);
    else if (!strcmp(key, "lookup")) device->lookup = atoi(value);
    else if (!strcmp(key, "mig")) device->mig = atoi(value);
}

static void parse(char *line, int *cards) {
    char *rest = NULL, *word;
    line[strcspn(line, "\n")] = 0;
    char *name = strstr(line, " name=");
    if (name) { *name = 0; name += 6; }
    word = strtok_r(line, " ", &rest);
    if (!word) return;
    if (!strcmp(word, "init")) { init_code = atoi(rest); return; }
    if (!strcmp(word, "boot")) { boot = atoi(rest); return; }
    if (!strcmp(word, "v2")) { has_v2 = atoi(rest); return; }
    if (!strcmp(word, "lists")) { lists = atoi(rest); return; }
    if (count == MOST) return;
    Device *device = &devices[count++];
    memset(device, 0, sizeof *device);
    device->is_instance = !strcmp(word, "instance");
    if (!device->is_instance) (*cards)++;
    device->parent = *cards - 1;
    if (name) snprintf(device->name, sizeof device->name, "%s", name);
    while ((word = strtok_r(NULL, " ", &rest))) {
        char *value = strchr(word, '=');
        if (value) { *value = 0; set(device, word, value + 1); }
    }
}

static void refresh(void) {
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    count = 0; init_code = 0; has_v2 = 1; lists = 1; boot = 0;
    if (!file) { init_code = 9; return; } /* driver not loaded */
    char line[2048];
    int cards = 0;
    while (fgets(line, sizeof line, file)) parse(line, &cards);
    fclose(file);
}

static int is_alive(long pid) {
    char path[64], state = 'Z';
    snprintf(path, sizeof path, "/proc/%ld/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file) return kill((pid_t)pid, 0) == 0 || errno == EPERM;
    char text[512] = "";
    size_t length = fread(text, 1, sizeof text - 1, file);
    text[length] = 0;
    fclose(file);
    char *end = strrchr(text, ')'); /* the name before it may hold anything */
    if (end) sscanf(end + 1, " %c", &state);
    return state != 'Z' && state != 'X';
}

/* Bytes of the device that processes hold; those that live are put into `found`, `room` of them at most. */
static unsigned long long claimed(const Device *device, Process *found, unsigned int room, unsigned int *living) {
    char path[4096], line[256], uuid[96];
    unsigned long long total = 0, bytes;
    snprintf(path, sizeof path, "%s.d", getenv("FAKE_NVML"));
    *living = 0;
    DIR *folder = opendir(path);
    if (!folder) return 0;
    struct dirent *entry;
    while ((entry = readdir(folder))) {
        long pid = strtol(entry->d_name, NULL, 10);
        if (pid <= 0 || strchr(entry->d_name, '.')) continue;
        char name[8192];
        snprintf(name, sizeof name, "%s/%s", path, entry->d_name);
        FILE *file = fopen(name, "r");
        if (!file) continue;
        while (fgets(line, sizeof line, file)) {
            if (sscanf(line, "%95s %llu", uuid, &bytes) != 2 || strcmp(uuid, device->uuid)) continue;
            if (!is_alive(pid)) continue;
            total += bytes;
            if (*living < room) found[*living] = (Process){(unsigned int)pid, bytes, 0, 0};
            ++*living;
        }
        fclose(file);
    }
    closedir(folder);
    return total;
}

/* A handle is a position in the file plus one. */
static Device *at(void *handle) {
    long position = (long)handle - 1;
    return position >= 0 && position < count ? &devices[position] : NULL;
}

static int find(int is_instance, unsigned int parent, unsigned int index, void **handle) {
    unsigned int seen = 0;
    for (int i = 0; i < count; i++) {
        if (devices[i].is_instance != is_instance || (is_instance && devices[i].parent != (int)parent)) continue;
        if (seen++ != index) continue;
        if (devices[i].lookup) return devices[i].lookup;
        *handle = (void *)(long)(i + 1);
        return SUCCESS;
    }
    return is_instance ? NOT_FOUND : INVALID_ARGUMENT;
}

static int enter(void) {
    pthread_mutex_lock(&lock);
    refresh();
    return users > 0 && boot == users_boot ? SUCCESS : UNINITIALIZED;
}

static int leave(int code) {
    pthread_mutex_unlock(&lock);
    return code;
}

static int measure(void *handle, MemoryV2 *memory) {
    Device *device = at(handle);
    if (!device) return INVALID_ARGUMENT;
    if (device->error) return device->error;
    unsigned int living;
    memory->total = device->total;
    memory->reserved = device->reserved;
    memory->used = device->used + claimed(device, NULL, 0, &living);
    memory->free = memory->total - memory->reserved > memory->used ? memory->total - memory->reserved - memory->used : 0;
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    enter();
    if (!init_code) { users++; users_boot = boot; }
    return leave(init_code);
}

int nvmlShutdown(void) {
    int code = enter();
    if (users > 0) users--;
    return leave(code);
}

int nvmlDeviceGetCount_v2(unsigned int *result) {
    int code = enter();
    *result = 0;
    for (int i = 0; i < count; i++) *result += !devices[i].is_instance;
    return leave(code);
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **handle) {
    int code = enter();
    return leave(code ? code : find(0, 0, index, handle));
}

int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned int *result) {
    int code = enter();
    *result = at(handle) && at(handle)->mig ? 7 : 0;
    return leave(code);
}

int nvmlDeviceGetMigMode(void *handle, unsigned int *current, unsigned int *pending) {
    int code = enter();
    Device *device = at(handle);
    if (!code && !device) code = INVALID_ARGUMENT;
    if (!code) *current = *pending = device->mig;
    return leave(code);
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *card, unsigned int index, void **handle) {
    int code = enter();
    Device *device = at(card);
    if (!code && !device) code = INVALID_ARGUMENT;
    return leave(code ? code : find(1, device->parent, index, handle));
}

int nvmlDeviceGetUUID(void *handle, char *text, unsigned int length) {
    int code = enter();
    Device *device = at(handle);
    if (!code && !device) code = INVALID_ARGUMENT;
    if (!code) snprintf(text, length, "%s", device->uuid);
    return leave(code);
}

int nvmlDeviceGetName(void *handle, char *text, unsigned int length) {
    int code = enter();
    Device *device = at(handle);
    if (!code && !device) code = INVALID_ARGUMENT;
    if (!code) snprintf(text, length, "%s", device->name);
    return leave(code);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    int code = enter();
    if (code) return leave(code);
    for (int i = 0; i < count; i++)
        if (!strcmp(devices[i].uuid, uuid)) { *handle = (void *)(long)(i + 1); return leave(devices[i].lookup); }
    return leave(NOT_FOUND);
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned int *room, Process *found) {
    int code = enter();
    Device *device = at(handle);
    unsigned int living = 0, had = *room;
    if (!code && !device) code = INVALID_ARGUMENT;
    if (!code && lists) claimed(device, found, found ? had : 0, &living);
    *room = living;
    return leave(code ? code : living > had ? SHORT : SUCCESS);
}

int nvmlSystemGetDriverVersion(char *text, unsigned int length) {
    snprintf(text, length, "999.1");
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(void *handle, MemoryV2 *memory) {
    int code = enter();
    if (!code && !has_v2) code = NO_FUNCTION;
    return leave(code ? code : measure(handle, memory));
}

/* The first version of the call counts the driver's own share as used. */
int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) {
    MemoryV2 all;
    int code = enter();
    if (!code) code = measure(handle, &all);
    if (!code) *memory = (Memory){all.total, all.free, all.used + all.reserved};
    return leave(code);
}

const char *nvmlErrorString(int code) {
    return code == NOT_SUPPORTED ? "Not Supported" : code == 9 ? "Driver Not Loaded" : code == 15 ? "GPU is lost"
        : code == UNINITIALIZED ? "Uninitialized" : "Error";
}
