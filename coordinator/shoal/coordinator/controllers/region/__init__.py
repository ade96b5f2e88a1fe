"""The regional coordinator built from the other rooms, with its signals, trust, doctor and follower. The top room: it
may import every other room.
"""
