"""From an experiment's hardware to machines that run it, and how a machine joins a cluster."""

# Values of `--on`, for a command line that imports no back end.
TARGETS = ("sky", "kuberay", "gcluster", "gcloud", "queued")
LOCAL = "local"
