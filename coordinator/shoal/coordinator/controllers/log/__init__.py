"""Events, the audit log and the region record with its fence. The bottom room: it imports no other room."""
