// A libcuda.so.1 without a device: what Triton's launchers call, as far as they call it. Launches go to a listener.
//
// Kernels are handles that `cuModuleGetFunction` counts up. A tensor map holds what it was made of, so that two of them
// are equal to the byte when they describe the same tensor in the same way.
#include "cuda.h"
#include <stdint.h>
#include <string.h>

#define SHARED_BYTES (227 << 10)

typedef void (*listener_t)(const CUlaunchConfig *, uint64_t function, void **parameters);

static listener_t listener;
static uint64_t functions;

void listen_to_launches(listener_t to) { listener = to; }

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  if (extra || !listener)
    return CUDA_ERROR_INVALID_VALUE;
  listener(config, (uint64_t)function, parameters);
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
  uint64_t *words = (uint64_t *)map;
  if (rank != 2 || (uint64_t)address % 16 || strides[0] % 16 || box[0] > 256 || box[1] > 256)
    return CUDA_ERROR_INVALID_VALUE;
  memset(map, 0, sizeof *map);
  const uint64_t all[] = {(uint64_t)address, type,    rank,    sizes[0], sizes[1],  strides[0], box[0],
                          box[1],            interleave, swizzle, promotion, fill};
  memcpy(words, all, sizeof all);
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)image;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)++functions;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? SHARED_BYTES : 1;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)value = pointer;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "refused by the device that is not there";
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int index) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
