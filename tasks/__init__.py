"""Everything between the flows and the core that needs Prefect: tasks, deployments, artifacts, automations."""
