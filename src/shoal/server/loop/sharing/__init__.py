"""GPU sharing of live jobs: co-located jobs, and pre-scheduled jobs that prepare where another is about to end.

`scheduler.sharing` decides, as in the simulator. `gpu_facts` answers its questions about the live jobs, `sharing`
applies its decisions, and `explanations` puts them into words.
"""
