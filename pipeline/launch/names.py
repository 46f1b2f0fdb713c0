"""Values of `--on`, for a command line that imports no recipe."""

TARGETS = ("sky", "kuberay", "gcloud", "queued")
LOCAL = "local"
