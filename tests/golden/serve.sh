#!/bin/sh
# Written by autotune 0.1.0 for reference on 2-core CPU (h1:00).
# Verdict: better. The best finalist has output_tok_s ×1.250 of the default's (interval 1.125 to 1.500, 7 blocks).
# Workload task, measured 2026-01-02T03:04:05+00:00, round r1:0123456789ab.
#   kl_mean 0.0125
#   output_tok_s 500 (default 400)
set -eu
export OMP_WAIT_POLICY=PASSIVE
export GOMP_SPINCOUNT=0
exec autotune serve \
  --engine native \
  --model /models/reference \
  --set allocator=default \
  --set attention=sparse \
  --set bits_attention=16 \
  --set bits_compensation=none \
  --set bits_dense=16 \
  --set bits_embedding=16 \
  --set bits_experts=4 \
  --set bits_group_size=64 \
  --set bits_lm_head=16 \
  --set bits_long=0 \
  --set bits_protect_first=0 \
  --set bits_protect_last=0 \
  --set bits_shared=16 \
  --set bits_vector= \
  --set block_size=16 \
  --set compute=fp32 \
  --set dp=1 \
  --set embed_on=device \
  --set ep=1 \
  --set graphs=eager \
  --set kda_chunk=64 \
  --set kv_dtype=bf16 \
  --set kv_splits=1 \
  --set kv_tokens=8192 \
  --set max_seqs=8 \
  --set pp=1 \
  --set prefix_reuse=true \
  --set state_cache_mib=1024 \
  --set state_dtype=fp32 \
  --set threads=1 \
  --set token_budget=512 \
  --set tp=1 \
  --set transfers=plain "$@"
