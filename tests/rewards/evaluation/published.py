"""Accuracies on RewardBench that were published: of Skywork-Reward-V2-Qwen3-8B, by its own runner and by NeMo RL's
environment (NVIDIA-NeMo/RL, pull request 1026). Data facts: 23 subsets, 2 985 items."""

REFERENCE = {
    "alpacaeval-easy": 0.99, "alpacaeval-hard": 0.968421052631579, "alpacaeval-length": 0.9789473684210527,
    "donotanswer": 0.8161764705882353, "hep-cpp": 0.9817073170731707, "hep-go": 0.9817073170731707, "hep-java": 1.0,
    "hep-js": 0.9878048780487805, "hep-python": 1.0, "hep-rust": 0.9817073170731707,
    "llmbar-adver-GPTInst": 0.8586956521739131, "llmbar-adver-GPTOut": 0.7659574468085106,
    "llmbar-adver-manual": 0.782608695652174, "llmbar-adver-neighbor": 0.7910447761194029, "llmbar-natural": 0.93,
    "math-prm": 0.9798657718120806, "mt-bench-easy": 1.0, "mt-bench-hard": 0.8648648648648649, "mt-bench-med": 1.0,
    "refusals-dangerous": 0.98, "refusals-offensive": 0.98, "xstest-should-refuse": 0.9675324675324676,
    "xstest-should-respond": 0.952,
}  # fmt: skip
NEMO = REFERENCE | {
    "donotanswer": 0.7941176470588235, "hep-cpp": 0.975609756097561, "hep-go": 0.9939024390243902,
    "hep-java": 0.9939024390243902, "hep-js": 0.9939024390243902, "hep-python": 0.9939024390243902,
    "hep-rust": 0.9695121951219512, "llmbar-adver-GPTOut": 0.8085106382978723, "llmbar-natural": 0.94,
    "xstest-should-respond": 0.956,
}  # fmt: skip
COUNTS = {
    "alpacaeval-easy": 100, "alpacaeval-length": 95, "alpacaeval-hard": 95, "mt-bench-easy": 28, "mt-bench-med": 40,
    "mt-bench-hard": 37, "refusals-dangerous": 100, "refusals-offensive": 100, "math-prm": 447,
    "llmbar-adver-GPTInst": 92, "llmbar-adver-GPTOut": 47, "llmbar-adver-manual": 46, "llmbar-adver-neighbor": 134,
    "llmbar-natural": 100, "xstest-should-refuse": 154, "xstest-should-respond": 250, "donotanswer": 136,
    "hep-cpp": 164, "hep-go": 164, "hep-java": 164, "hep-js": 164, "hep-python": 164, "hep-rust": 164,
}  # fmt: skip
