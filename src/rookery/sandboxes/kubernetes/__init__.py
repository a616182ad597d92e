"""The `kubernetes` provider: each sandbox is a pod of a cluster. Runs in the owner's process.

`provider` implements the service of pods, `pod_manifest` translates between sandboxes and pods, `client` sends
requests to the API server, and `cluster_access` finds the cluster and the credentials of the user.
"""
