"""submitit on Shoal: `submitit.AutoExecutor(folder, cluster="shoal")`. submitit finds it by its entry points."""
