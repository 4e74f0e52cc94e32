"""What the API shows: conditions, the status of a PDDeployment and its scalers, Events.

`status` and `conditions` are pure; `report` and `events` write.
"""
