"""The hub: who may generate what, which groups a step trains, which weight version is newest."""
