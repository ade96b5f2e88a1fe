"""The reconcile step from documents to desired sets, the stored migrations and the operator's moves. May import
identity, fleet, documents and log.
"""
