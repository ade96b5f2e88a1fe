"""The state machine of one assignment on one node.

The path is fetching -> loading -> warming -> (verifying ->) ready -> draining -> gone, and failed(code, retry_at) on
the way. A staged assignment stops when its bytes are on disk: fetching -> staged.
"""
