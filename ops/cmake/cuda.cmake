# The CUDA kernels, linked into the same library. CUDA code is entered for CUDA tensors only, and the
# runtime is static, so the library loads where there is no driver.
set(BATON_OPS_CUDA_ARCHITECTURES
    "80-real;86-real;89-real;90a-real;100-real;100-virtual"
    CACHE STRING "CUDA architectures to build for; the compile check narrows it to 90a-real")
set(CMAKE_CUDA_ARCHITECTURES "${BATON_OPS_CUDA_ARCHITECTURES}")
enable_language(CUDA)

# First those that take a minute each, so that none is compiled alone at the end.
target_sources(
  baton_ops
  PRIVATE csrc/cuda/scaled_turned.cu
          csrc/cuda/sampling.cu
          csrc/cuda/attention.cc
          csrc/cuda/decode_attention.cu
          csrc/cuda/decoder_rows.cu
          csrc/cuda/generic_decoder.cu
          csrc/cuda/latent.cu
          csrc/cuda/latent_attention.cu
          csrc/cuda/latent_hopper.cu
          csrc/cuda/logprobs.cu
          csrc/cuda/matmul.cc
          csrc/cuda/matmul_few.cu
          csrc/cuda/matmul_grouped.cu
          csrc/cuda/matmul_many.cu
          csrc/cuda/prompt_attention.cu
          csrc/cuda/rank_sum.cu
          csrc/cuda/routes.cu
          csrc/cuda/scaled.cc
          csrc/cuda/scaled.cu
          csrc/cuda/scaled_row.cu
          csrc/cuda/step.cu
          csrc/cuda/tensor_map.cc
          csrc/cuda/export_decoder.cc
          csrc/cuda/export_experts.cc
          csrc/cuda/export_latent.cc
          csrc/cuda/export_matmul.cc
          csrc/cuda/export_ranks.cc
          csrc/cuda/export_sampling.cc
          csrc/cuda/export_scaled.cc
          csrc/cuda/export_step.cc)
set_target_properties(
  baton_ops
  PROPERTIES CUDA_ARCHITECTURES "${BATON_OPS_CUDA_ARCHITECTURES}"
             CUDA_RUNTIME_LIBRARY Static
             CUDA_STANDARD 17
             CUDA_STANDARD_REQUIRED ON
             CUDA_VISIBILITY_PRESET hidden)
target_compile_definitions(baton_ops PRIVATE BATON_OPS_CUDA)
target_compile_options(baton_ops PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-lineinfo>)
# The binding layer's device guard includes the runtime's headers from C++.
target_include_directories(baton_ops SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
