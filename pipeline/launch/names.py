"""What can be launched on, as `--on` takes it; the command line imports nothing more."""

TARGETS = ("sky", "kuberay", "gcloud", "queued")
LOCAL = "local"
