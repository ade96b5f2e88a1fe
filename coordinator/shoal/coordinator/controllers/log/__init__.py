"""Events, the audit log, the region record with its fence, and the codec of stored values. The bottom room: it imports
no other room.
"""
