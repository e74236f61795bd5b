"""New weights on their way from a trainer to engines (the path is below).

trainer:  training/loop.py → Rollouts.update_weights →
          engine.update_weights(named_tensors, version)      the only method that callers use
            └─ WeightSender.send                             chooses the transfer
                 ├─ shared memory: share_weights → WeightFile
                 └─ between GPUs: vLLM's trainer side (CUDA IPC or NCCL) → Offer
engine:   engine.load_offer(offer, version)                  the receiving half; vLLM's workers: vllm/worker.py
"""
