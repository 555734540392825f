"""Names of files and directories in checkpoints of other programs."""

MODEL_FILE = "model_optim_rng.pt"  # of a rank in a legacy directory
OPTIMIZER_FILE = "distrib_optim.pt"  # of a rank in a legacy directory
LATEST = "latest_universal"  # DeepSpeed's tracker of universal checkpoints
ENGINE_LATEST = "latest"  # DeepSpeed's tracker of checkpoints of its engine
ENGINE_MODEL_FILES = "*mp_rank_*_model_states.pt"  # of the engine
ZERO = "zero"  # the directory of parameters in a universal checkpoint
RELEASE = "release"  # in a tracker and as a directory: weights that belong to no iteration
PARAMS = "params.json"  # of a Llama model of Meta
CONSOLIDATED = "consolidated.*.pth"  # its weights
# Files of transformers that prepare the images of a multimodal model.
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
